"""A grammar that nothing can go on with ends its request with an error, in every arrangement of instances."""

from collections.abc import Mapping
from typing import Any

import pytest

from baton import LLM, SamplingParams
from core.errors import RequestError
from core.types import Grammar

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DEAD_END = Grammar(text=f'start: "{"yes " * 20}" X\nX: /b/ & /c/')
"""Nothing is both. It comes so late that nobody sees it before."""
SOON = Grammar(text='start: "yes " X\nX: /b/ & /c/')
GOOD = Grammar(text='start: "yes" | "no"')
ARRANGEMENTS: Mapping[str, dict[str, Any]] = {
    "one instance": {},
    "prefill and decode": {"prefill_instances": 1, "schedule__local_threshold_tokens": 0},
    "drafts": {"engine__speculate": "ngram"},
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_a_dead_end_is_an_error_that_says_where(arrangement: str) -> None:
    with LLM("embedded", **ARRANGEMENTS[arrangement]) as llm:
        with pytest.raises(RequestError, match="grammar: the grammar cannot be completed: no token"):
            llm.generate("Is it so?", params(SOON), progress=False)
        for _ in range(2):
            with pytest.raises(
                RequestError, match=r"dead end after \d+ tokens of output, the last of which are '.*yes "
            ):
                llm.generate("Is it so?", params(DEAD_END), progress=False)
        (answer,) = llm.generate("Is it so?", params(GOOD), progress=False)
    assert answer.text in ("yes", "no")
    assert answer.finish_reason == "stop"


def params(grammar: Grammar) -> SamplingParams:
    return SamplingParams(max_tokens=150, grammar=grammar)
