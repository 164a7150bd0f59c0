"""A pool that follows its load on a real Ray: one more instance while it is full, one less when it is calm, and nobody notices."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.cluster_process import serving
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.turns(6, number=5)]
SETTINGS = {
    "scaling.enabled": "true",
    "scaling.interval_s": "0.5",
    "scaling.decode_max": "2",
    "scaling.calm_s": "4",
    "scaling.cold_start_s": "5",
    "engine.max_num_seqs": "4",
}


def test_load_brings_an_instance_and_calm_takes_one_away_without_a_failed_request(tmp_path: Path) -> None:
    settings = [part for item in SETTINGS.items() for part in ("--set", "=".join(item))]
    stop, busy = threading.Event(), threading.Event()
    busy.set()
    with (
        serving("--prefill", "0", "--decode", "1", *settings, log=tmp_path / "log") as server,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client,
        ThreadPoolExecutor(8) as threads,
    ):

        def ask(number: int) -> int:
            """Answers that came whole: all that were asked for, until `stop`; one client goes on in calm times."""
            whole = 0
            while not stop.is_set():
                if number and not busy.is_set():
                    time.sleep(0.05)
                    continue
                answer = client.completions.create(
                    model="baton-embedded", prompt=f"def f{number}(", max_tokens=40, temperature=0
                )
                assert answer.usage is not None
                assert answer.choices[0].finish_reason is not None
                whole += 1
            return whole

        clients = [threads.submit(ask, number) for number in range(8)]
        try:
            server.wait_status("two instances", lambda status: len(status["instances"]) == 2)
            busy.clear()
            server.wait_status("one instance", lambda status: len(status["instances"]) == 1)
        finally:
            stop.set()
        assert all(one.result() > 0 for one in clients)
        (pool,) = server.status()["pools"]
        assert (pool["wanted"], pool["num_grown"], pool["num_shrunk"]) == (1, 1, 1)
        assert pool["cold_start_s"] not in (0, float(SETTINGS["scaling.cold_start_s"])), "it was measured"
        assert pool["reason"].startswith("whose load is 0")
        metrics = httpx.get(f"{server.base_url}/metrics", timeout=PATIENCE_S).text
        assert 'baton_pool_wanted_instances{pool="decode"} 1.0' in metrics
        assert 'baton_pool_resizes_total{direction="up",pool="decode"} 1.0' in metrics
