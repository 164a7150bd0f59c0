"""A real model whose prefixes come back from host memory under the steps that read them: the same text as when they never left."""

import pytest

from baton import LLM, SamplingParams
from engine.tiers.layer_gate import LayerGate

pytestmark = pytest.mark.slow

PROMPTS = [f"import os\n\n\nclass A{number}:\n    pass\n" * 10 for number in range(5)]


def answers(host_cache_bytes: int) -> list[str]:
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(engine__num_blocks=16, engine__host_cache_bytes=host_cache_bytes) as llm:
        return [answer.text for prompt in PROMPTS * 2 for answer in llm.generate([prompt], sampling)]


def test_restored_prefixes_give_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(0)
    filled: list[int] = []
    begin = LayerGate.begin

    def counted(self: LayerGate, blocks: tuple[int, ...]):
        filled.extend(blocks)
        return begin(self, blocks)

    monkeypatch.setattr(LayerGate, "begin", counted)
    assert answers(500_000_000) == expected
    assert len(filled) > 5 * len(PROMPTS), "little came back from below"
