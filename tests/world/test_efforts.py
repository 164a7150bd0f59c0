"""Efforts, as published chat templates take them."""

import pytest

from cluster.ingress.templates.reasoning_effort import ReasoningEfforts
from tests.world.published_tokenizers import ours


@pytest.mark.slow
def test_qwen3_is_switched_and_any_effort_is_one_of_the_two() -> None:
    tokenizer = ours("qwen3")
    efforts = ReasoningEfforts(tokenizer, reasons=True)
    ask = [{"role": "user", "content": "x"}]
    own = tokenizer.render_chat(ask)
    for effort, is_off in (
        ("none", True),
        ("minimal", True),
        ("low", False),
        ("medium", False),
        ("max", False),
    ):
        text = tokenizer.render_chat(ask, **efforts.of(effort).arguments)
        assert text.endswith("<think>\n\n</think>\n\n") == is_off, effort
        assert (text == own) != is_off


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "llama3_1"])
def test_a_model_that_knows_no_effort_goes_its_own_way(name: str) -> None:
    tokenizer = ours(name)
    efforts = ReasoningEfforts(tokenizer, reasons=False)
    assert not efforts.of("high").arguments
    assert "knows none" in efforts.of("high").note
