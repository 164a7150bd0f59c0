"""A model with experts and latent attention over real Ray, real HTTP and TCP with checksums, against transformers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from models.tokenizer import load_tokenizer
from tests.e2e.cluster_process import ServeProcess, serving
from tests.models.served import greedy, make_served, some_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
SETTINGS = [
    "schedule.local_threshold_tokens=4",
    "engine.block_size=4",
    "transfer.transport=tcp",
    "transfer.checksum=true",
]


def test_deepseek_disaggregated_also_while_prefill_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    reference = make_served(folder, "deepseek_v3", 1)
    prompts, tokenizer = some_prompts(3, 10, 60), load_tokenizer(folder)
    want = [tokenizer.decode(list(greedy(reference, prompt, 8))) for prompt in prompts]
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    with (
        serving(
            "--model", str(folder), "--prefill", "1", "--decode", "1", *options, log=tmp_path / "log"
        ) as server,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):
        server.wait_status("two instances", lambda status: len(status["instances"]) == 2)
        name = client.models.list().data[0].id

        def ask(prompt: list[int]) -> str:
            answer = client.completions.create(model=name, prompt=prompt, max_tokens=8, temperature=0)
            return answer.choices[0].text

        assert [ask(prompt) for prompt in prompts[:4]] == want[:4]
        server.wait_idle(2)
        metrics = httpx.get(f"{server.base_url}/metrics", timeout=30).text
        assert 'baton_kv_transfers_total{transport="tcp"}' in metrics
        running = [threads.submit(ask, prompt) for prompt in prompts[4:]]
        server.replicas("PrefillPool")[0].kill()
        assert [answer.result() for answer in running] == want[4:]
        server.wait_idle(2)
        assert len(ray_sessions(server)) == 1
        assert server.memory_bytes() < 2e9
    assert ray_sessions(server) == []


def ray_sessions(server: ServeProcess) -> list[Path]:
    """What Ray has left in its temporary folder for this server."""
    return list(Path("/tmp/ray").glob(f"session_*_{server.process.pid}"))
