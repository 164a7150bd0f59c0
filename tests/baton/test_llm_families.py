"""Experts and latent attention through the whole of Baton in one process: alone, and disaggregated."""

from pathlib import Path

import pytest

from baton import LLM, SamplingParams
from tests.models.served import greedy, make_served, some_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.turns(3)]
SMALL = {"engine__block_size": 4, "engine__num_blocks": 400, "engine__max_batch_tokens": 24}
DISAGGREGATED = {"prefill_instances": 1, "decode_instances": 2, "schedule__local_threshold_tokens": 0}


@pytest.mark.parametrize(
    ("family", "draw"),
    [
        ("mixtral", 1),
        ("qwen3_moe", 2),
        ("deepseek_v2", 0),
        ("deepseek_v3", 1),
        ("gpt_oss", 0),
        ("glm_moe_dsa", 0),
    ],
)
def test_tokens_equal_transformers_alone_and_disaggregated(family: str, draw: int, tmp_path: Path) -> None:
    """Prompts longer than a step are computed in chunks; the second time their prefixes are cached."""
    reference = make_served(tmp_path, family, draw)
    prompts = some_prompts(draw, 6, 60)
    want = [greedy(reference, prompt, 8) for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    for roles in ({}, DISAGGREGATED):
        with LLM(str(tmp_path), **SMALL, **roles) as llm:
            for _ in range(2):
                answers = llm.generate(prompts, params, progress=False)
                assert [answer.token_ids for answer in answers] == want, roles
