"""Instances that prefill and decode as the scheduler says, over real Ray, real HTTP and the real transports."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.e2e.cluster_process import serving
from tests.e2e.reference import corpus_prompts, greedy_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
NUM_TOKENS = 32


def test_every_answer_equals_transformers_and_nothing_is_left(tmp_path: Path) -> None:
    prompts = [list(prompt) for prompt in corpus_prompts(16)]
    with (
        serving(
            "--any-role", "--decode", "2", "--set", "schedule.local_threshold_tokens=0", log=tmp_path / "log"
        ) as server,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        status = server.wait_status("two instances", lambda status: len(status["instances"]) == 2)
        assert all(one["prefills"] and one["decodes"] for one in status["instances"])

        def ask(prompt: list[int]) -> str:
            return (
                client.completions.create(
                    model="baton-embedded", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0
                )
                .choices[0]
                .text
            )

        want = [greedy_text(tuple(prompt), NUM_TOKENS) for prompt in prompts]
        for _ in range(2):  # the first time the instances learn how long their steps take
            assert list(threads.map(ask, prompts)) == want
        server.wait_idle(2)
