"""Published tokenizers, through a GGUF file and back."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from core.errors import UnsupportedModel
from models.files.gguf_tokenizer import write_tokenizer
from models.text.tokenizer_files import transformers_tokenizer
from tests.models.gguf_vocabularies import HARD_TEXTS, read_tokenizer, write_vocabulary
from tests.world.artefacts import artefact

pytestmark = pytest.mark.slow
PUBLISHED = {
    "qwen3": ("qwen2", {}, 151936),
    "deepseek_v3": ("deepseek-v3", {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": False}, 129280),
    "gptoss": ("gpt-4o", {}, 201088),
    "llama3_1": ("llama-bpe", {"bos_token_id": 128000, "eos_token_id": 128009}, 0),
    "llama2": (None, {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}, 0),
    "gemma3": (
        None,
        {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0, "add_space_prefix": False},
        262208,
    ),
}  # fmt: skip
"""What the converter calls the split of each, the keys that it writes, and how many rows the model has."""
CONVERTED = (
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "refact",
    "starcoder",
)  # fmt: skip
"""Vocabularies that llama.cpp's tests have, with texts, and with the ids that the models' own tokenizers give for them."""


def converted(path: Path, to: Path) -> Any:
    to.mkdir()
    write_tokenizer(path, to)
    return transformers_tokenizer(to)


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_are_those_of_the_tokenizer_that_the_file_was_made_of(name: str, tmp_path: Path) -> None:
    folder = artefact(name)
    published, (pre, keys, size) = read_tokenizer(folder), PUBLISHED[name]
    write_vocabulary(tmp_path / "model.gguf", published, pre, keys, size)
    own, theirs = (
        converted(tmp_path / "model.gguf", tmp_path / "made"),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    added = [each["content"] for each in published["added_tokens"] if not each["content"].isspace()]
    marked = [f"say {one} and{other} then " for one, other in itertools.pairwise([*added[:6], *added[-6:]])]
    for text in (*HARD_TEXTS, *marked):
        ids = theirs.encode(text).ids
        assert own.encode(text) == ids
        assert own.decode(ids) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", CONVERTED)
def test_tokens_of_llama_cpps_own_files_are_those_of_the_models(name: str, tmp_path: Path) -> None:
    path = artefact("llama_cpp") / f"ggml-vocab-{name}.gguf"
    own = converted(path, tmp_path / "made")
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    wanted = path.with_suffix(".gguf.out").read_text().splitlines()
    for text, ids in zip(texts[: len(wanted)], wanted, strict=True):
        assert own.encode(text, add_special_tokens=False) == [int(each) for each in ids.split()]
        assert own.decode([int(each) for each in ids.split()]) == text


def test_vocabularies_of_other_kinds_are_refused(tmp_path: Path) -> None:
    for name, kind in (("bert-bge", "bert"), ("nomic-bert-moe", "t5")):
        with pytest.raises(UnsupportedModel, match=f"has the tokenizer '{kind}'"):
            converted(artefact("llama_cpp") / f"ggml-vocab-{name}.gguf", tmp_path / kind)
