"""The tokenizer of a GGUF file is the one that the file was made of, whatever its architecture."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    CohereTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    Qwen2Tokenizer,
    Qwen3_5Tokenizer,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from benchmarks.engine.gguf_tokens import digest
from core.errors import ConfigError, UnsupportedModel
from models.files.gguf_ends import text_ends
from models.files.gguf_merges import merges_of_ranks
from models.files.gguf_metadata import read_metadata
from models.files.gguf_splits import SPLITS
from models.files.gguf_tokenizer import write_tokenizer
from models.text.tokenizer import Tokenizer as OwnTokenizer
from models.text.tokenizer_files import transformers_tokenizer
from tests.models.gguf_vocabularies import HARD_TEXTS

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "gguf_tokens.json"
CONTROL, USER, UNUSED, BYTE = (
    gguf.TokenType.CONTROL,
    gguf.TokenType.USER_DEFINED,
    gguf.TokenType.UNUSED,
    gguf.TokenType.BYTE,
)
PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "a",
    "b",
    "▁a",
    "ab",
    "▁ab",
    "▁▁",
]


@pytest.fixture(scope="module")
def learned() -> tuple[dict[str, int], list[list[str]]]:
    """A vocabulary and merges that run over whole texts, so that a split in another place gives other tokens."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        HARD_TEXTS, BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], model["merges"]


def write_file(
    path: Path,
    tokens: Sequence[str],
    merges: Sequence[Sequence[str]] | None,
    pre: str | None = None,
    *,
    model: str = "gpt2",
    types: Mapping[int, int] | None = None,
    architecture: str = "of-next-year",
    **values: Any,
) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types([(types or {}).get(index, gguf.TokenType.NORMAL) for index in range(len(tokens))])
    if merges is not None:
        writer.add_token_merges([" ".join(pair) for pair in merges])
    for key, value in values.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"tokenizer.{key}" if key.startswith("chat") else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> Any:
    folder = path.parent / f"{path.stem}-made"
    folder.mkdir()
    write_tokenizer(path, folder)
    return transformers_tokenizer(folder)


def by_id(vocabulary: Mapping[str, int]) -> list[str]:
    return sorted(vocabulary, key=lambda token: vocabulary[token])


@pytest.mark.parametrize(
    ("pre", "kind"),
    [
        ("gpt-2", GPT2Tokenizer),
        ("qwen2", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
        ("command-r", CohereTokenizer),
        ("olmo", GPTNeoXTokenizer),
    ],
)
def test_tokens_are_those_of_the_models_own_class(pre: str, kind: Any, learned: Any, tmp_path: Path) -> None:
    vocabulary, merges = learned
    own = read(write_file(tmp_path / "m.gguf", by_id(vocabulary), merges, pre))
    theirs = kind(vocab=vocabulary, merges=[tuple(pair) for pair in merges], add_prefix_space=False)
    for text in HARD_TEXTS:
        ids = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert own.encode(text) == ids
        assert own.decode(ids) == theirs.backend_tokenizer.decode(ids)


@pytest.mark.parametrize("pre", sorted(GGUF_PRE_TOKENIZER_SPLITS.keys() - {"pixtral", "jina-v5-nano"}))
def test_splits_that_transformers_knows_are_its_own(pre: str) -> None:
    assert SPLITS[pre].steps == (("split", GGUF_PRE_TOKENIZER_SPLITS[pre]), ("bytes", "whole"))


def test_each_split_was_compared_with_llama_cpp_and_each_difference_is_explained() -> None:
    found = json.loads(RESULTS.read_text())["names"]
    assert found.keys() == {name for name, split in SPLITS.items() if not split.is_text} | {"missing"}
    assert [name for name, row in found.items() if row["differ"] and "why" not in row] == []
    assert [name for name, row in found.items() if row["split"] != digest(name)] == []
    assert sum(not row["differ"] for row in found.values()) >= 65


def test_a_split_that_is_not_known_is_refused_by_name(learned: Any, tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.gguf", by_id(learned[0]), learned[1], "of-next-year")
    with pytest.raises(
        UnsupportedModel, match=r"m\.gguf splits text as 'of-next-year' \(tokenizer\.ggml\.pre\)"
    ):
        read(path)


def test_a_file_that_names_no_split_is_read_as_llama_cpp_does_with_a_warning(
    learned: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        named = read(write_file(tmp_path / "named.gguf", by_id(learned[0]), learned[1], "default"))
        assert caplog.text == ""
        silent = read(write_file(tmp_path / "silent.gguf", by_id(learned[0]), learned[1]))
    assert "lacks tokenizer.ggml.pre" in caplog.text
    assert all(silent.encode(text) == named.encode(text) for text in HARD_TEXTS)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "none", "of-next-year"])
def test_other_kinds_of_vocabularies_are_refused_by_name(model: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.gguf", ["a"], [], model=model)
    with pytest.raises(UnsupportedModel, match=f"has the tokenizer '{model}'"):
        read(path)


def test_a_folder_with_the_type_of_another_tokenizer_keeps_its_split(learned: Any, tmp_path: Path) -> None:
    """transformers has a class of its own for `qwen2`, which splits as Qwen 2 does whatever tokenizer.json says."""
    own = read(write_file(tmp_path / "m.gguf", by_id(learned[0]), learned[1], "deepseek-v3"))
    (tmp_path / "m-made" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    again = transformers_tokenizer(tmp_path / "m-made")
    assert [again.encode(text) for text in HARD_TEXTS] == [own.encode(text) for text in HARD_TEXTS]


def test_added_tokens_stay_whole_and_those_of_control_are_special(learned: Any, tmp_path: Path) -> None:
    vocabulary, size = by_id(learned[0]), len(learned[0])
    added = ["<|im_start|>", "<|im_end|>", "<think>", f"[PAD{size + 3}]", "<｜x｜>"]
    types = {size: CONTROL, size + 2: USER, size + 3: UNUSED, size + 4: CONTROL}
    own = read(write_file(tmp_path / "m.gguf", [*vocabulary, *added], learned[1], "qwen2", types=types))
    ids = own.encode("<|im_start|>a<think>b<｜x｜><|im_end|>")
    assert [token for token in ids if token >= size] == [size, size + 2, size + 4, size + 1]
    assert own.decode(ids, skip_special_tokens=True) == "a<think>b"
    assert f"[PAD{size + 3}]" not in own.get_vocab()


def test_texts_begin_and_end_as_the_file_says(learned: Any, tmp_path: Path) -> None:
    tokens, size = [*by_id(learned[0]), "<s>", "</s>", "<pad>"], len(learned[0])
    ids = {"bos_token_id": size, "eos_token_id": size + 1, "padding_token_id": size + 2}
    types = {size: CONTROL, size + 1: CONTROL, size + 2: CONTROL}
    for number, (pre, flags, ends) in enumerate(
        [
            ("llama-bpe", {}, (True, False)),
            ("llama-bpe", {"add_bos_token": False}, (False, False)),
            ("qwen2", {}, (False, False)),
            ("qwen2", {"add_bos_token": True, "add_eos_token": True}, (True, True)),
        ]
    ):
        own = read(
            write_file(tmp_path / f"{number}.gguf", tokens, learned[1], pre, types=types, **ids, **flags)
        )
        found = own.encode("x")
        assert (found[0] == size, found[-1] == size + 1) == ends
        assert (own.bos_token, own.eos_token, own.pad_token) == ("<s>", "</s>", "<pad>")


def test_a_word_that_is_a_token_stays_whole_where_the_models_own_has_it_so(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    for pre, pieces in (("llama-bpe", 1), ("qwen2", 3), ("tekken", 1)):
        own = read(write_file(tmp_path / f"{pre}.gguf", [*letters, "abc"], [], pre))
        assert len(own.encode("abc")) == pieces


def test_merges_that_a_vocabulary_of_ranks_lacks_follow_from_it(learned: Any, tmp_path: Path) -> None:
    own = read(write_file(tmp_path / "m.gguf", by_id(learned[0]), None, "kimi-k2"))
    whole = read(write_file(tmp_path / "w.gguf", by_id(learned[0]), merges_of_ranks(learned[0]), "kimi-k2"))
    assert [own.encode(text) for text in HARD_TEXTS] == [whole.encode(text) for text in HARD_TEXTS]


def write_pieces(path: Path, **values: Any) -> Path:
    types = {0: gguf.TokenType.UNKNOWN, 1: CONTROL, 2: CONTROL} | dict.fromkeys(range(3, 259), BYTE)
    tokens = [*PIECES, *values.pop("more", ())]
    types |= dict.fromkeys(range(len(PIECES), len(tokens)), values["kinds"]) if "kinds" in values else {}
    values.pop("kinds", None)
    scores = [-float(index) for index in range(len(tokens))]
    return write_file(path, tokens, None, model="llama", types=types, scores=scores, **values)


def test_pieces_have_a_space_before_each_text_and_bytes_for_what_is_missing(tmp_path: Path) -> None:
    own = read(write_pieces(tmp_path / "m.gguf"))
    tokens = own.convert_ids_to_tokens
    assert tokens(own.encode("ab é")) == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokens(own.encode(" a</s>ab")) == ["<s>", "▁", "▁a", "</s>", "▁ab"]
    assert own.decode(own.encode("ab é"), skip_special_tokens=True) == "ab é"
    plain = read(write_pieces(tmp_path / "p.gguf", add_space_prefix=False, add_bos_token=False))
    assert tokens(plain.encode("ab ab")) == ["ab", "▁ab"]


def test_text_after_mistrals_special_tokens_has_no_space_of_its_own(tmp_path: Path) -> None:
    own = read(write_pieces(tmp_path / "m.gguf", more=["[INST]"], kinds=CONTROL))
    assert own.convert_ids_to_tokens(own.encode("[INST] ab")) == ["<s>", "[INST]", "▁ab"]


def test_phi_3_drops_spaces_after_its_tokens(tmp_path: Path) -> None:
    path = write_pieces(tmp_path / "m.gguf", more=["<|user|>"], kinds=CONTROL, architecture="phi3")
    own = read(path)
    assert own.convert_ids_to_tokens(own.encode("<|user|>\n ab")) == ["<s>", "<|user|>", "▁ab"]


def test_text_pieces_with_merges_are_those_of_gemma(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *PIECES[3:]]
    merges = [("▁", "▁"), ("▁", "a"), ("a", "b"), ("▁a", "b")]
    types = {4 + len(PIECES) - 4: USER} | dict.fromkeys(range(4), CONTROL)
    written = [token.replace("▁▁", "  ") for token in tokens]
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    own = read(write_file(tmp_path / "m.gguf", written, merges, model="gemma4", types=types, **ids))
    theirs = GemmaTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    for text in ("ab  ab", " a é", "a   b ab", "▁▁a", ""):
        ids = theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert own.encode(text) == ids
        assert own.decode(ids) == theirs.backend_tokenizer.decode(ids)


def test_every_template_of_a_file_can_be_rendered(learned: Any, tmp_path: Path) -> None:
    templates = {
        "chat_template": "plain {{ messages[0].content }}",
        "chat_templates": ["tool_use"],
        "chat_template.tool_use": "with tools {{ messages[0].content }}",
    }
    path = write_file(tmp_path / "m.gguf", by_id(learned[0]), learned[1], "qwen2", **templates)
    read(path)
    own = OwnTokenizer(tmp_path / "m-made")
    said = [{"role": "user", "content": "hello"}]
    assert own.render_chat(said) == "plain hello"
    assert own.render_chat(said, template_name="tool_use") == "with tools hello"
    assert set(own.template_names) == {"default", "tool_use"}


@pytest.mark.parametrize(
    ("tokens", "types", "values", "ends"),
    [
        (["<s>", "</s>", "<|im_end|>", "<|endoftext|>"], {}, {"eos_token_id": 3}, [3, 1, 2]),
        (["a", "<|end|>", "<|return|>", "<|call|>"], {}, {"eos_token_id": 2}, [2, 3]),
        (["a", "<|end|>", "<|call|>"], {}, {"eos_token_id": 2}, [2, 1]),
        (["a", "</s>", "<eos>", "<end_of_turn>"], {1: USER, 2: CONTROL}, {"eos_token_id": 2}, [2, 3]),
        (["a", "<|eot_id|>", "<|eom_id|>", "b"], {}, {"eos_token_id": 3, "eot_token_id": 1}, [3, 1, 2]),
        (["a", "<|eot_id|>", "<|im_end|>"], {}, {"eos_token_id": 0, "eot_token_id": 1, "eom_token_id": 0}, [0, 1]),
        (["a"], {}, {}, []),
    ],
)  # fmt: skip
def test_ends_that_a_file_does_not_name_are_found_by_their_text(
    tokens: list[str], types: dict[int, int], values: dict[str, int], ends: list[int], tmp_path: Path
) -> None:
    every = dict.fromkeys(range(len(tokens)), CONTROL) | types
    path = write_file(tmp_path / "m.gguf", tokens, [], "qwen2", types=every, **values)
    assert text_ends(read_metadata(path)) == {"eos_token_id": ends}


def test_metadata_are_those_that_gguf_reads(learned: Any, tmp_path: Path) -> None:
    path = write_file(
        tmp_path / "m.gguf", by_id(learned[0]), learned[1], "qwen2", bos_token_id=3, add_bos_token=True
    )
    reader = gguf.GGUFReader(str(path))
    theirs = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    own = read_metadata(path)
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()} == theirs
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="an incomplete download"):
        read_metadata(path)
