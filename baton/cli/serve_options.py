"""The options of `baton serve`, made from one table: which key of the configuration each one sets.

What an option means, what it takes and its default are the key's own (`ClusterConfig`). An option that is not given sets nothing,
so the file's or the environment's value stands, whatever the default is."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from core.config.cluster_config import ClusterConfig
from core.config.config_words import keys_of, title_of

KEYS: Final[Mapping[str, str]] = {
    "model": "model.path",
    "models": "models",
    "name": "model.name",
    "alias": "model.aliases",
    "adapter": "model.adapters",
    "load_format": "model.load_format",
    "dtype": "model.dtype",
    "quantization": "model.quantization",
    "max_context": "model.max_context_tokens",
    "tool_call_parser": "model.tool_call_parser",
    "reasoning_parser": "model.reasoning_parser",
    "prefill": "prefill_instances",
    "decode": "decode_instances",
    "any_role": "any_role",
    "prefill_tp": "prefill.tp",
    "prefill_pp": "prefill.pp",
    "prefill_dp": "prefill.dp",
    "prefill_ep": "prefill.ep",
    "decode_tp": "decode.tp",
    "decode_pp": "decode.pp",
    "decode_dp": "decode.dp",
    "decode_ep": "decode.ep",
    "host": "serve.host",
    "port": "serve.port",
    "api_key": "serve.api_keys",
    "transport": "transfer.transport",
    "kv_replicas": "transfer.kv_replicas",
    "deterministic": "engine.deterministic",
    "speculate": "engine.speculate",
    "log_level": "serve.log_level",
}
"""By option (with dashes on the command line), the key."""
_OTHERS: Final[Mapping[str, Any]] = {
    "local": Annotated[bool, typer.Option("--local", help="One process, no Ray.")],
    "config": Annotated[
        Path | None, typer.Option(help="YAML file with any of the configuration's keys.", show_default=False)
    ],
    "set_": Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any configuration key, e.g. engine.block_size=32.",
            show_default=False,
        ),
    ],
    "ray_address": Annotated[
        str, typer.Option(help="Join this Ray cluster (`auto`, or host:port) instead of starting one here.")
    ],
}
_DEFAULTS: Final[Mapping[str, Any]] = {"local": False, "config": None, "set_": None, "ray_address": "local"}


def flag(option: str) -> str:
    """Return the option as it is typed."""
    return "--" + option.replace("_", "-")


def signature() -> inspect.Signature:
    """Return the signature from which typer makes the command line. Each option's default is None, for not given."""
    fields = dict(keys_of(ClusterConfig))
    ours = {option: _annotation(option, fields[key]) for option, key in KEYS.items()}
    kinds = [*ours.items(), *_OTHERS.items()]
    return inspect.Signature(
        [
            inspect.Parameter(
                option, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(option), annotation=annotation
            )
            for option, annotation in kinds
        ]
    )


def overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by key, what was given on the command line. `--any-role` leaves no instance for prefill alone unless `--prefill`
    does."""
    said = {
        KEYS[option]: value for option, value in given.items() if option in KEYS and value not in (None, [])
    }
    if said.get("any_role") and "prefill_instances" not in said:
        said["prefill_instances"] = 0
    return said


def _annotation(option: str, field: FieldInfo) -> Any:
    shown: dict[str, Any] = {
        "help": _first_sentence(field.description or ""),
        "show_default": _shown(field.default),
    }
    if field.annotation is bool:
        return Annotated[bool | None, typer.Option(flag(option), **shown)]
    if get_origin(field.annotation) in (tuple, Mapping):
        return Annotated[list[str] | None, typer.Option(flag(option), metavar=field.title or "TEXT", **shown)]
    kind: Any = int if field.annotation is int else str
    return Annotated[
        kind | None, typer.Option(flag(option), metavar="|".join(_choices(field.annotation)) or None, **shown)
    ]


def _choices(annotation: Any) -> list[str]:
    """Return what may be given, where it is one of a few."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return [choice for one in get_args(annotation) for choice in _choices(one)]
    return [shown] if (shown := title_of(annotation)) else []


def _shown(default: Any) -> str | bool:
    return str(default) if default not in ("", None, (), False, {}) else False


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."
