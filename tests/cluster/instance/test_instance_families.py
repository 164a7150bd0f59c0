"""Experts, sinks and latents handed over: every prompt is computed by one instance and decoded by another."""

import asyncio
from pathlib import Path

import pytest

from core.messages import NeedPrefill
from tests.cluster.instance.instance_world import world
from tests.models.continuation import continuation
from tests.models.served import make_served, some_prompts


@pytest.mark.parametrize(
    ("family", "draw"),
    [
        ("mixtral", 1),
        ("deepseek_v2", 0),
        ("deepseek_v3", 1),
        ("gpt_oss", 0),
        ("deepseek_v32", 0),
        ("glm_moe_dsa", 3),
    ],
)
async def test_handed_over_tokens_equal_transformers(family: str, draw: int, tmp_path: Path) -> None:
    reference = make_served(tmp_path, family, draw)
    batch = [tuple(prompt) for prompt in some_prompts(draw, 6)]
    async with world(tmp_path, 1, 2) as w:
        for _ in range(2):
            got = await asyncio.gather(*(w.run(prompt, 12) for prompt in batch))
            assert got == [continuation(reference, p, said, 12) for p, said in zip(batch, got, strict=True)]
        assert not any(isinstance(message, NeedPrefill) for message in w.messages), "a hand-over failed"
        await w.idle()
