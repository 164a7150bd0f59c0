"""`suffix`: each family's prompt, as its makers write it."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.ingress.openai.fill_in_middle import MARKS, fill_in_middle
from core.errors import RequestError
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import COMPLETIONS, SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import TemplateTokenizer

FAMILIES = {
    # From the makers' examples, for the prompt "def f(" and the suffix "return x".
    "Qwen2.5-Coder": (
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>",
    ),
    "StarCoder": (
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        "<fim_prefix>def f(<fim_suffix>return x<fim_middle>",
    ),
    "DeepSeek-Coder": (
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        "<｜fim▁begin｜>def f(<｜fim▁hole｜>return x<｜fim▁end｜>",
    ),
    "Code Llama": (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), "▁<PRE>def f(▁<SUF>return x▁<MID>"),
    "Codestral": (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]return x[PREFIX]def f("),
}


class Beginning(TemplateTokenizer):
    """Puts a token before every text."""

    def __init__(self, special: tuple[str, ...]) -> None:
        super().__init__("", ("<s>", *special))
        self.added_tokens = self.special_tokens

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [300, *super().encode(text)] if add_special_tokens else super().encode(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_is_what_the_family_was_trained_on(family: str) -> None:
    special, want = FAMILIES[family]
    tokenizer = Beginning(special)
    filled = fill_in_middle(tokenizer, "def f(", "return x")
    assert tokenizer.decode(filled.prompt, skip_special_tokens=False) == "<s>" + want
    assert [tokenizer.decode([token], skip_special_tokens=False) for token in filled.end] == [*special[3:]]


def test_no_family_is_taken_for_another() -> None:
    for marks in MARKS:
        special = (marks.before_prefix, marks.before_suffix, marks.before_middle)
        prompt = fill_in_middle(Beginning(tuple(filter(None, special))), "a", "b").prompt
        assert len(prompt) == 3 + len([*filter(None, special)])
    with pytest.raises(RequestError, match="no tokens for text between"):
        fill_in_middle(Beginning(("<fim_prefix>", "<fim_suffix>")), "a", "b")


async def test_a_completion_with_a_suffix() -> None:
    tokenizer = Beginning(FAMILIES["Code Llama"][0])
    api = Api(FakeGenerator("x)"), replace(SETTINGS, vocab_size=400), tokenizer=tokenizer)
    body: dict[str, Any] = {"model": NAME, "prompt": ["f(", "g("], "suffix": "return x"}
    answer = await api.post(COMPLETIONS, body)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["x)", "x)"]
    texts = [tokenizer.decode(each.prompt, skip_special_tokens=False) for each in api.generator.requests]
    assert texts == [f"<s>▁<PRE>{name}(▁<SUF>return x▁<MID>" for name in "fg"]
    assert tokenizer.special_tokens["▁<EOT>"] in api.generator.requests[0].sampling.stop_token_ids
    for change in ({"prompt": [1, 2]}, {"echo": True}, {"suffix": 5}):
        refused = await api.post(COMPLETIONS, body | change)
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            400,
            "echo" if "echo" in change else "suffix",
        )
    await api.http.aclose()


async def test_a_model_without_the_tokens_says_so() -> None:
    api = Api(FakeGenerator())
    refused = await api.post(COMPLETIONS, {"model": NAME, "prompt": "x", "suffix": "y"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")
    await api.http.aclose()
