"""A model on Ray sleeps and wakes up, and one of its sleeping processes is killed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster_process import ServeProcess, serving
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.turns(6, number=3)]
BODY = {"model": "baton-embedded", "prompt": "import os", "max_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    log: Path = tmp_path_factory.mktemp("sleep") / "log"
    sleepy = ["--set", "schedule.residency.mode=manual"]
    with serving("--model", "embedded", "--prefill", "1", "--decode", "1", *sleepy, log=log) as server:
        server.wait_idle(2)
        yield server


def post(server: ServeProcess, path: str) -> httpx.Response:
    return httpx.post(f"{server.base_url}{path}", timeout=PATIENCE_S)


def asked(server: ServeProcess) -> httpx.Response:
    return httpx.post(f"{server.base_url}/v1/completions", json=BODY, timeout=PATIENCE_S)


def wakes(server: ServeProcess) -> None:
    assert post(server, "/wake_up").json() == {"is_sleeping": False}


def test_replicas_sleep_and_wake_up_where_they_are(server: ServeProcess) -> None:
    want = asked(server).json()["choices"][0]["text"]
    before = {role: [one.pid for one in server.replicas(role)] for role in ("PrefillPool", "DecodePool")}
    for level in (1, 2):
        assert post(server, f"/sleep?level={level}").json() == {"is_sleeping": True}
        status = server.status()
        assert not status["instances"]
        assert [one["level"] for one in status["sleepers"]] == [level, level]
        refused = asked(server)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_asleep")
        wakes(server)
        assert asked(server).json()["choices"][0]["text"] == want
    assert before == {role: [one.pid for one in server.replicas(role)] for role in before}


def test_a_killed_sleeper_is_replaced_by_an_instance_that_serves(server: ServeProcess) -> None:
    want = asked(server).json()["choices"][0]["text"]
    assert post(server, "/sleep").status_code == 200
    (victim,) = server.replicas("DecodePool")
    os.kill(victim.pid, signal.SIGKILL)
    ends_at = time.monotonic() + 2 * PATIENCE_S
    while not any(one["decodes"] for one in server.status()["instances"]):
        assert time.monotonic() < ends_at
        time.sleep(0.2)
    assert asked(server).json()["choices"][0]["text"] == want
    wakes(server)
    assert len(server.status()["instances"]) == 2
