"""A model with experts and latent attention over real Ray, real HTTP and the real transports, against transformers."""

from pathlib import Path

import httpx
import openai
import pytest

from models.tokenizer import load_tokenizer
from tests.e2e.cluster_process import serving
from tests.models.served import greedy, make_served, some_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def test_deepseek_disaggregated(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    reference = make_served(folder, "deepseek_v3", 1)
    prompts, tokenizer = some_prompts(3, 4, 60), load_tokenizer(folder)
    settings = ["schedule.local_threshold_tokens=4", "engine.block_size=4", "transfer.transport=tcp"]
    options = [part for setting in settings for part in ("--set", setting)]
    with (
        serving(
            "--model", str(folder), "--prefill", "1", "--decode", "1", *options, log=tmp_path / "log"
        ) as server,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        server.wait_status("two instances", lambda status: len(status["instances"]) == 2)
        name = client.models.list().data[0].id
        for prompt in prompts:
            answer = client.completions.create(model=name, prompt=prompt, max_tokens=8, temperature=0)
            assert answer.choices[0].text == tokenizer.decode(list(greedy(reference, prompt, 8)))
        server.wait_idle(2)
        metrics = httpx.get(f"{server.base_url}/metrics", timeout=30).text
        assert 'baton_kv_transfers_total{transport="tcp"}' in metrics
