"""Published tokenizers as Baton and as transformers read them. They are kept, since loading a large one takes seconds."""

from functools import lru_cache
from typing import Any

from transformers import AutoTokenizer

from models.text.tokenizer import Tokenizer, load_tokenizer
from tests.world.artefacts import artefact

_NUM_KEPT = 6
"""A large one takes hundreds of MiB."""


@lru_cache(_NUM_KEPT)
def ours(name: str) -> Tokenizer:
    return load_tokenizer(artefact(name))


@lru_cache(_NUM_KEPT)
def theirs(name: str) -> Any:
    return AutoTokenizer.from_pretrained(str(artefact(name)))
