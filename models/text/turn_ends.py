"""Which tokens end an answer: what config.json, generation_config.json and the tokenizer's files name, together.

Published checkpoints often name the end of a turn in one of them alone."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from core.errors import UnsupportedModel
from models.spec.model_spec import read_json

Json = Mapping[str, Any]


def turn_ends(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the ids, each once. Ids that the model has no row for cannot be sampled and are left out. Raises ConfigError and
    UnsupportedModel."""
    generation, config = _json(folder / "generation_config.json"), _json(folder / "config.json")
    text = config.get("text_config")
    # The decoder's own part holds what its class takes for granted, unless the whole says nothing.
    own = _ids(config.get("eos_token_id")) or _ids(
        text.get("eos_token_id") if isinstance(text, Mapping) else None
    )
    every = dict.fromkeys([*_ids(generation.get("eos_token_id")), *own, *_tokenizer_ends(folder)])
    return tuple(token for token in every if 0 <= token < vocab_size)


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _ids(value: Any) -> list[int]:
    """Return the ids of an `eos_token_id`: null, a number, or a list. Raises UnsupportedModel."""
    values = [each for each in (value if isinstance(value, list | tuple) else [value]) if each is not None]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, int):
            raise UnsupportedModel(f"eos_token_id holds {each!r}, which is no token id")
    return values


def _tokenizer_ends(folder: Path) -> Iterable[int]:
    """Yield the id of the tokenizer's `eos_token`, where it has one that its files know."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = _json(folder / name)
        if text := _content(settings.get("eos_token")):
            yield from _id_of(text, folder, settings)
            return


def _content(token: Any) -> str:
    """Return a token's text. transformers writes it as a string, or as an object with more about it."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else ""


def _id_of(text: str, folder: Path, settings: Json) -> list[int]:
    """Return the token's id in a list, empty where no file has the token."""
    for token, about in (settings.get("added_tokens_decoder") or {}).items():
        if _content(about) == text:
            return [int(token)]
    if isinstance(found := _json(folder / "added_tokens.json").get(text), int):
        return [found]
    path = folder / "tokenizer.json"
    return _id_in_vocabulary(text, path.read_text()) if path.is_file() else []


def _id_in_vocabulary(text: str, tokenizer: str) -> list[int]:
    """Look the token up in tokenizer.json. The added tokens come first in it: all of it takes a quarter of a second to read."""
    at = tokenizer.find('"added_tokens"')
    start = tokenizer.find("[", at)
    if at >= 0 and start >= 0:
        added, _ = json.JSONDecoder().raw_decode(tokenizer, start)
        for about in added:
            if about["content"] == text:
                return [about["id"]]
    vocabulary = json.loads(tokenizer)["model"].get("vocab")
    found = vocabulary.get(text) if isinstance(vocabulary, dict) else None
    return [found] if isinstance(found, int) else []
