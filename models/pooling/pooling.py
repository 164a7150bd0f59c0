"""How a checkpoint makes one vector of a text, from the files that sentence-transformers leaves beside it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from core.errors import UnsupportedModel
from models.spec.model_spec import read_json

PoolingKind = Literal["last", "mean", "cls"]
_MODES: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The names of the flags in releases before 6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    kind: PoolingKind
    normalise: bool = True
    max_tokens: int = 0
    """The longest text that it takes; 0 means what the model was made for."""
    scores: bool = False
    """Texts are pairs, and what is made of one is a number: how well the two go together."""
    sigmoid: bool = False
    """The number is brought between 0 and 1."""


def is_embedder(folder: Path) -> bool:
    return (folder / "modules.json").exists()


def read_pooling(folder: Path) -> Pooling | None:
    """Return the pooling, or None where nothing says that the model was made for it. Raises ConfigError and UnsupportedModel."""
    if not is_embedder(folder):
        return None
    pooling, normalise = "", False
    for path, kind in modules_of(folder):
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling = _mode(folder / path / "config.json")
            case "Dense" if pooling and not normalise:
                pass  # models/pooling/readout.py's
            case "Normalize":
                normalise = True
            case _:
                raise UnsupportedModel(
                    f"{folder / 'modules.json'} has the module {kind!r}; Transformer, Pooling, Dense and Normalize, in this "
                    "order, are supported"
                )
    if pooling not in _MODES:
        raise UnsupportedModel(
            f"{folder} pools by {pooling or 'nothing'!r}; {', '.join(map(repr, _MODES))} are supported"
        )
    path = folder / "sentence_bert_config.json"
    limits = read_json(path) if path.exists() else {}
    if limits.get("do_lower_case"):
        raise UnsupportedModel(f"{path} says do_lower_case: a tokenizer that does it by itself is supported")
    return Pooling(kind=_MODES[pooling], normalise=normalise, max_tokens=limits.get("max_seq_length") or 0)


def modules_of(folder: Path) -> list[tuple[str, str]]:
    """(folder, kind) of each of sentence-transformers' modules, in order; none where it has left no file. Raises ConfigError and
    UnsupportedModel."""
    if not is_embedder(folder):
        return []
    path = folder / "modules.json"
    entries = read_json(path, list)
    try:
        return [(str(entry["path"]), str(entry["type"]).rpartition(".")[2]) for entry in entries]
    except (KeyError, TypeError) as error:
        raise UnsupportedModel(f"{path} holds an entry without path or type: {error}") from None


def _mode(path: Path) -> str:
    config: dict[str, Any] = read_json(path)
    if mode := config.get("pooling_mode"):
        return mode if isinstance(mode, str) else "+".join(map(str, mode))
    return "+".join(name for flag, name in _FLAGS.items() if config.get(flag))
