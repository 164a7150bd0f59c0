"""A real model whose prefixes come back from host memory: the same text as when they never left."""

from collections.abc import Sequence

import pytest

from baton import LLM, SamplingParams
from engine.tiers.tier_store import TierStore

pytestmark = pytest.mark.slow

PROMPTS = [f"import os\n\n\nclass A{number}:\n    pass\n" * 10 for number in range(5)]


def answers(host_cache_bytes: int) -> list[str]:
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(engine__num_blocks=16, engine__host_cache_bytes=host_cache_bytes) as llm:
        return [answer.text for prompt in PROMPTS * 2 for answer in llm.generate([prompt], sampling)]


def test_restored_prefixes_give_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(0)
    filled: list[int] = []
    fill = TierStore.fill

    async def counted(self: TierStore, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        filled.extend(blocks)
        await fill(self, blocks, contents)

    monkeypatch.setattr(TierStore, "fill", counted)
    assert answers(500_000_000) == expected
    assert len(filled) > 5 * len(PROMPTS), "little came back from below"
