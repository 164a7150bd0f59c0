"""What is made of the values' model (`chart_values.py`): `values.schema.json`, and the defaults for the templates.

No object of the schema takes an unknown key."""

import json
from math import inf
from pathlib import Path
from typing import Any

from chart_values import ChartValues, Head, Ingress, Pool

from core.config.cluster_config import ClusterConfig

CHART = Path(__file__).parent / "baton"
SCHEMA, DEFAULTS = CHART / "values.schema.json", CHART / "files" / "defaults.json"


def schema() -> dict[str, Any]:
    """Return the JSON schema. No object takes unknown keys, not even dataclasses. A row of `models` may be a path alone."""
    made: dict[str, Any] = _without_infinity(ChartValues.model_json_schema())
    rows = made["$defs"]["ClusterConfig"]["properties"]["models"]["patternProperties"]
    for name, row in rows.items():
        rows[name] = {"anyOf": [row, {"type": "string"}]}
    _close(made)
    return made


def _without_infinity(node: Any) -> Any:
    """Return `node` with null instead of infinite numbers, which JSON cannot write.

    Where infinity is the default, the schema also accepts null."""
    match node:
        case float() if node == inf:
            return None
        case list():
            return [_without_infinity(value) for value in node]
        case {"default": default, "type": str(kind), **rest} if default == inf:
            return {**rest, "default": None, "type": [kind, "null"]}
        case dict():
            return {key: _without_infinity(value) for key, value in node.items()}
        case _:
            return node


def _close(node: Any) -> None:
    match node:
        case dict():
            if "properties" in node or "patternProperties" in node:
                node.setdefault("additionalProperties", False)
            node.pop("title", None) if isinstance(node.get("title"), str) else None
            for value in node.values():
                _close(value)
        case list():
            for value in node:
                _close(value)
        case _:
            pass


def made() -> dict[Path, str]:
    """The generated files' contents."""
    defaults = {
        "config": ClusterConfig().model_dump(mode="json"),
        "head": Head().model_dump(),
        "ingress": Ingress().model_dump(),
        "pool": Pool().model_dump(),
    }
    return {
        path: json.dumps(what, indent=1, allow_nan=False) + "\n"
        for path, what in ((SCHEMA, schema()), (DEFAULTS, _without_infinity(defaults)))
    }


if __name__ == "__main__":
    for path, content in made().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
