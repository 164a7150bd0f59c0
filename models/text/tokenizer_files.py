"""Loads a tokenizer from the files that a checkpoint has: tokenizer.json, Mistral's tekken.json, or SentencePiece's model."""

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from core.errors import ConfigError
from models.files.gguf_splits import GGUF_SPLIT
from models.spec.model_spec import read_json

_log = logging.getLogger(__name__)
_TOKENIZER, _TEKKEN, _SENTENCE_PIECE = "tokenizer.json", "tekken.json", "tokenizer.model"
_TEKKENS_OWN: Final = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "add_bos_token": True,
}
"""What all of Mistral's tekken.json mean and none says."""
_MISTRALS: Final = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
"""Model types whose tokenizer.json transformers 4 wrote with a wrong split of words, where it came from tekken.json."""


def transformers_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer. Raises ConfigError."""
    # Seconds, in processes that tokenize alone.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

    # Where mistral-common is installed, transformers would return a class of another kind.
    options: dict[str, Any] = {"mistral_format": False}
    kind: Any = AutoTokenizer
    if (split := _json(folder / "tokenizer_config.json").get(GGUF_SPLIT)) is not None:
        # Its tokenizer.json is complete. The class of the model's type would have a split of its own.
        kind, options = PreTrainedTokenizerFast, {"fix_mistral_regex": False}
        if not split:
            _log.warning(
                "the GGUF file of %s lacks tokenizer.ggml.pre: text is split by llama.cpp's default, which may give other tokens "
                "than the model was trained on. Convert the model again with a current llama.cpp",
                folder,
            )
    elif not (folder / _TOKENIZER).is_file() and (folder / _TEKKEN).is_file():
        options |= _TEKKENS_OWN
    elif _splits_words_wrongly(folder):
        options["fix_mistral_regex"] = True
    try:
        return kind.from_pretrained(str(folder), **options)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"cannot load the tokenizer in {folder}: {_reason(folder, error)}") from None


def _reason(folder: Path, error: Exception) -> str:
    """Return why a tokenizer cannot be loaded, and what to do where a package is missing."""
    if not (folder / _TOKENIZER).is_file():
        for name, module in ((_TEKKEN, "mistral_common"), (_SENTENCE_PIECE, "sentencepiece")):
            if (folder / name).is_file() and find_spec(module) is None:
                wheel = module.replace("_", "-")
                return f"{name} without {_TOKENIZER} needs the package {wheel}: pip install {wheel}"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _splits_words_wrongly(folder: Path) -> bool:
    """Return whether this is such a tokenizer.json, and nothing says how it is to be read."""
    settings, config = (_json(folder / name) for name in ("tokenizer_config.json", "config.json"))
    version = str(config.get("transformers_version") or "0").partition(".")[0]
    is_old = config.get("model_type") in _MISTRALS and version.isdigit() and int(version) < 5
    return is_old and "fix_mistral_regex" not in settings and _splits_bytes(folder / _TOKENIZER)


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _splits_bytes(path: Path) -> bool:
    """Return whether a tokenizer.json splits words by a pattern and then reads their bytes, as tekken.json does."""
    text = path.read_text() if path.is_file() else ""
    at = text.find("{", text.find('"pre_tokenizer"'))
    if at < 0 or '"pre_tokenizer"' not in text:
        return False
    found, _ = json.JSONDecoder().raw_decode(text, at)
    kinds = [each.get("type") for each in found.get("pretokenizers") or ()]
    return kinds == ["Split", "ByteLevel"]
