"""A real server in a process of its own, without Ray, with tenants, two pools and some load."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.cluster_process import ServeProcess, serving

KEY, LIMITED_KEY = "key-of-acme", "key-of-small"
METRICS_KEY = "key-of-prometheus"
TENANTS = {
    "acme": {"keys": [KEY], "slo_classes": ["chat", "batch"]},
    "small": {"keys": [LIMITED_KEY], "max_requests_per_min": 1},
}


def headers(key: str = KEY) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("observed") / "log"
    settings = (
        f"tenants={json.dumps(TENANTS)}",
        f"serve.api_keys={json.dumps([METRICS_KEY + ' metrics'])}",
        "schedule.local_threshold_tokens=0",
        "engine.kv_bytes=16777216",
        "serve.log_format=json",
    )
    options = [part for setting in settings for part in ("--set", setting)]
    with serving("--local", "--prefill", "1", "--decode", "2", *options, log=log) as server:
        yield server


def ask(server: ServeProcess, number: int) -> None:
    """One request, every other one with a prompt that no cache has; every fourth is of a tenant that may not ask so often."""
    name = f"new_{number}" if number % 2 else "old"
    body = {
        "model": "baton-embedded",
        "prompt": f"def {name}(x):\n" * 12,
        "max_tokens": 24,
        "n": 1 + number % 2,
    }
    key = KEY if number % 4 else LIMITED_KEY
    tier = ("chat", "batch")[number % 2] if number % 4 else "auto"
    answer = httpx.post(
        f"{server.base_url}/v1/completions",
        json={**body, "service_tier": tier},
        headers=headers(key),
        timeout=60,
    )
    assert answer.status_code in (200, 429)


@contextmanager
def load(server: ServeProcess) -> Iterator[Callable[[], int]]:
    """Requests one after the other in the background; gives how many were answered so far."""
    stop, count, failures = threading.Event(), [0], list[BaseException]()

    def run() -> None:
        try:
            while not stop.is_set():
                ask(server, count[0])
                count[0] += 1
                time.sleep(0.05)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: count[0]
    finally:
        stop.set()
        thread.join(60)
    assert not failures, failures
