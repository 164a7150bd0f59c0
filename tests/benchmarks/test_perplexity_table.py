"""The table of what each way of storing loses is that of the measurement, which holds what the page claims."""

import json
from typing import Any, get_args

from benchmarks.engine.perplexity_table import PAGE, RESULT, page
from models.formats.rounded_matrix import Scheme


def measured() -> dict[str, dict[str, Any]]:
    return {row["format"]: row for row in json.loads(RESULT.read_text())["formats"]}


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert text == page(text, json.loads(RESULT.read_text())), (
        "run python -m benchmarks.engine.perplexity_table"
    )


def test_every_scheme_was_measured_on_load_and_as_a_folder() -> None:
    for scheme in get_args(Scheme):
        assert any(name.startswith(scheme) for name in measured())
        assert f"folder of {scheme}" in measured()


def test_in_float32_logits_are_those_of_each_format_s_own_library() -> None:
    """The library of compressed-tensors makes matrices bfloat16 where scales are."""
    compared = {name: row for name, row in measured().items() if "library_loss" in row}
    assert len(compared) >= 10
    for name, row in compared.items():
        allowed = 0.05 if name in ("folder of fp8", "folder of int8", "folder of int4") else 1e-3
        assert row["max_logit_error_float32"] < allowed * row["logit_spread"], name
