"""`python -m baton.config_page`: writes the table of docs/configuration.md from the configuration's classes."""

from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from baton.cli.serve_options import KEYS, flag
from core.config.cluster_config import ClusterConfig
from core.config.config_words import allowed, keys_of

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
_BEGIN, _END = "<!-- keys -->\n", "<!-- /keys -->\n"
_POOLS = ("prefill.", "decode.")


def page(text: str) -> str:
    """Return `text` with the table of today."""
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}{_table()}{_END}{rest.partition(_END)[2]}"


def _table() -> str:
    rows = ["| key | option | default | takes | meaning |", "|---|---|---|---|---|"]
    for key, field in keys_of(ClusterConfig):
        if key.startswith(_POOLS[1]):
            continue
        names = [key, _POOLS[1] + key.removeprefix(_POOLS[0])] if key.startswith(_POOLS[0]) else [key]
        options = [flag(option) for option, of in KEYS.items() if of in names]
        cells = [
            _code(names),
            _code(options),
            _default(field),
            _takes(field),
            " ".join((field.description or "").split()),
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _code(words: list[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if isinstance(value, dict):
        return ", ".join(f"`{name}`" for name in value) or "none"  # pyright: ignore[reportUnknownVariableType]
    return f"`{value}`" if value not in ("", None, ()) else "none"


def _takes(field: FieldInfo) -> str:
    return field.title or (
        "names and their keys, see below" if isinstance(field.default, dict) else allowed(field)
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
