"""The tokens that end an answer are those that any file of a checkpoint names."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import UnsupportedModel
from models.text.turn_ends import turn_ends

TURN_END = {"content": "<|im_end|>", "special": True}


def ends(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> tuple[int, ...]:
    write(folder, config=config, generation_config=generation or {})
    return turn_ends(folder, 100)


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("token", ["<|im_end|>", TURN_END])
@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": {"7": TURN_END}}},
        {"added_tokens": {"<|im_end|>": 7}},
        {"tokenizer": {"added_tokens": [{"id": 7, **TURN_END}], "model": {}}},
        {"tokenizer": {"added_tokens": [], "model": {"vocab": {"<|im_end|>": 7}}}},
    ],
)
def test_the_tokenizers_end_is_one_of_the_models(tmp_path: Path, token: Any, files: dict[str, Any]) -> None:
    settings = {**files.get("tokenizer_config", {}), "eos_token": token}
    write(tmp_path, **{**files, "tokenizer_config": settings})
    assert ends(tmp_path, {"eos_token_id": 3}) == (3, 7)


def test_special_tokens_map_names_it_where_tokenizer_config_does_not(tmp_path: Path) -> None:
    write(tmp_path, special_tokens_map={"eos_token": "</s>"}, added_tokens={"</s>": 2})
    assert ends(tmp_path, {}) == (2,)


def test_all_files_count_and_null_counts_for_nothing(tmp_path: Path) -> None:
    config = {"eos_token_id": None, "text_config": {"eos_token_id": [4, None]}}
    assert ends(tmp_path, config, {"eos_token_id": [9, 4]}) == (9, 4)
    assert ends(tmp_path, {"eos_token_id": 1}, {"eos_token_id": None}) == (1,)
    assert ends(tmp_path, {**config, "eos_token_id": [5]}) == (5,)
    assert ends(tmp_path, {}) == ()


def test_a_token_beyond_the_models_rows_is_left_out(tmp_path: Path) -> None:
    assert ends(tmp_path, {"eos_token_id": [100, 99, -1]}) == (99,)


@pytest.mark.parametrize("value", ["2", True, [2.0]])
def test_what_is_no_token_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedModel, match="no token id"):
        ends(tmp_path, {"eos_token_id": value})
