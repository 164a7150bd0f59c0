"""Why text is not decoded by `tokenizers`' own stream: where the two differ, and that elsewhere they say the same."""

import random
from functools import cache

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from cluster.ingress.generation.detokenize import TextStream
from models.text.tokenizer import Tokenizer, load_tokenizer
from tests.world.artefacts import artefact

TEXT = "def f(x):\n    return 'Größe 你好 한국어'  # 🏳️‍🌈 " * 3
NAMES = ["qwen3", "llama2"]


@cache
def loaded(name: str) -> tuple[Tokenizer, Backend]:
    folder = artefact(name)
    return load_tokenizer(folder), Backend.from_file(str(folder / "tokenizer.json"))


def theirs(backend: Backend, ids: list[int]) -> str:
    stream = DecodeStream(skip_special_tokens=True)
    return "".join(stream.step(backend, token) or "" for token in ids)


def ours(codec: Tokenizer, ids: list[int]) -> str:
    stream = TextStream(codec, ())
    return "".join([stream.push(token) for token in ids]) + stream.finish()


@pytest.mark.parametrize("name", NAMES)
def test_both_streams_say_a_text(name: str) -> None:
    codec, backend = loaded(name)
    ids = codec.encode(TEXT, add_special_tokens=False)
    assert ours(codec, ids) == theirs(backend, ids) == codec.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_become_no_character_are_shown_and_not_held_for_ever(name: str) -> None:
    """An output may end within a character, or have the first byte of one again and again."""
    codec, backend = loaded(name)
    start = codec.encode("a", add_special_tokens=False)
    ids = [*start, *codec.encode("\U0010fffd", add_special_tokens=False)[:-1]]
    assert ours(codec, ids) == codec.decode(ids)
    assert "\ufffd" in ours(codec, ids)
    assert "\ufffd" not in theirs(backend, ids)


def test_bytes_in_no_order_do_not_end_the_stream() -> None:
    """Llama 2 decodes a run of bytes as a whole, so that one byte changes what those before it say."""
    codec, backend = loaded("llama2")
    rng, num_raised = random.Random(2), 0
    for _ in range(10):
        text = "".join(rng.choices("\U0010fffd\ue000\u4e00\U0001f600", k=20))
        ids = codec.encode(text, add_special_tokens=False)
        rng.shuffle(ids)
        try:
            theirs(backend, ids)
        except Exception as error:
            num_raised += "Invalid prefix" in str(error)
        assert "\ufffd" in ours(codec, ids)
    assert num_raised
