"""`baton deploy` with a plain Serve file on a real Ray: overrides hold, an upgrade under load loses nothing, a mistake is named."""

import asyncio
import copy
import itertools
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.cluster_process import ROOT
from tests.e2e.reference import corpus_prompts, greedy_texts
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.turns(6, number=3)]
ENV = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
_PAUSE_S = 0.3
"""Clients that never paused would take the processors from the replicas that start."""
EXAMPLE = yaml.safe_load((ROOT / "examples" / "serve" / "baton.yaml").read_text())


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.deploy.ray_head", "4"]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as head:
        assert head.stdin is not None
        assert head.stdout is not None
        yield head.stdout.readline().strip()
        head.stdin.close()
        assert head.wait(60) == 0


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


def deploy(content: dict[str, Any], dashboard: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "app.yaml"
    path.write_text(yaml.safe_dump(content))
    return baton("deploy", str(path), "--address", dashboard)


def baton(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.cli", *args]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False, env=ENV
    )


def example(port: int) -> dict[str, Any]:
    content = copy.deepcopy(EXAMPLE)
    serve = {"host": "127.0.0.1", "port": port, "drain_notice_s": 0.5}
    content["applications"][0]["args"]["serve"] |= serve
    return content


def instances(url: str) -> set[str]:
    return {instance["address"] for instance in httpx.get(f"{url}/cluster", timeout=60).json()["instances"]}


class Load:
    """Asks again and again in `num` loops until `stop`; each text is compared with transformers'."""

    def __init__(self, base_url: str, num: int) -> None:
        self._url, self._stop, self.num_done, self.wrong = base_url, asyncio.Event(), 0, list[str]()
        prompts = corpus_prompts(2 * num)
        self._expected = dict(zip(prompts, greedy_texts(prompts, 48), strict=True))
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(num)]

    async def _run(self, i: int) -> None:
        mine = list(self._expected.items())[2 * i : 2 * i + 2]
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            for prompt, expected in itertools.cycle(mine):
                if self._stop.is_set():
                    return
                body = {"model": "baton-embedded", "prompt": list(prompt), "max_tokens": 48, "temperature": 0}
                try:
                    answer = await client.post("/v1/completions", json=body)
                    text = answer.json()["choices"][0]["text"] if answer.is_success else answer.text
                except httpx.HTTPError as error:
                    text = repr(error)
                if text != expected:
                    self.wrong.append(text)
                self.num_done += 1
                await asyncio.sleep(_PAUSE_S)

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)


async def test_a_new_version_replaces_everything_under_load_and_nothing_is_lost(
    dashboard: str, port: int, tmp_path: Path
) -> None:
    content = example(port)
    result = await asyncio.to_thread(deploy, content, dashboard, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "DecodePool 2/2" in result.stderr
    url = f"http://127.0.0.1:{port}"
    old = await asyncio.to_thread(instances, url)
    assert len(old) == 3
    load = Load(url, 2)
    content["applications"][0]["args"]["engine"] = {"max_batch_tokens": 256}
    result = await asyncio.to_thread(deploy, content, dashboard, tmp_path)
    assert result.returncode == 0, result.stderr
    new = await asyncio.to_thread(instances, url)
    assert len(new) == 3
    assert not new & old
    await load.stop()
    assert load.wrong == []
    assert load.num_done > 10


async def test_a_rollout_restarts_one_pool_after_the_other_and_nothing_is_lost(
    dashboard: str, port: int
) -> None:
    """Take away a part of what the test before has deployed."""
    url = f"http://127.0.0.1:{port}"
    old = await asyncio.to_thread(instances, url)
    load = Load(url, 2)
    pools = ("--only", "DecodePool", "--only", "PrefillPool")
    result = await asyncio.to_thread(baton, "rollout", *pools, "--address", dashboard)
    assert result.returncode == 0, result.stderr
    await load.stop()
    new = await asyncio.to_thread(instances, url)
    assert len(new) == 3
    assert not new & old
    assert load.wrong == []
    assert result.stderr.index("PrefillPool: replacing 1") < result.stderr.index("DecodePool: replacing 2")


async def test_what_serve_takes_away_leaves_nothing_unanswered(
    dashboard: str, port: int, tmp_path: Path
) -> None:
    """One decode instance fewer, under load: its sequences go on at the other. All else stays as it is, restarted or not."""
    content = example(port)
    content["applications"][0]["args"]["engine"] = {"max_batch_tokens": 256}
    content["applications"][0]["deployments"][1]["num_replicas"] = 1
    url = f"http://127.0.0.1:{port}"
    old = await asyncio.to_thread(instances, url)
    load = Load(url, 2)
    result = await asyncio.to_thread(deploy, content, dashboard, tmp_path)
    assert result.returncode == 0, result.stderr
    async with asyncio.timeout(60):
        while len(await asyncio.to_thread(instances, url)) != 2:
            await asyncio.sleep(0.2)
    assert await asyncio.to_thread(instances, url) < old
    await load.stop()
    assert load.wrong == []
    assert load.num_done > 2


def test_what_cannot_be_built_is_said_in_one_line(dashboard: str, tmp_path: Path) -> None:
    content = example(free_port())
    content["applications"][0]["args"]["model"]["path"] = str(tmp_path / "nothing")
    result = deploy(content, dashboard, tmp_path)
    assert result.returncode == 2
    assert "there is no model folder" in result.stderr.splitlines()[-1]


def test_a_missing_token_and_a_missing_cluster_are_said_in_one_line(dashboard: str, tmp_path: Path) -> None:
    path = ROOT / "examples" / "serve" / "baton.yaml"
    command = [sys.executable, "-m", "baton.cli", "deploy", str(path), "--address"]
    without = {name: value for name, value in ENV.items() if not name.startswith("RAY_AUTH")}
    for address, named in (
        (dashboard, "RAY_AUTH_TOKEN"),
        (f"http://127.0.0.1:{free_port()}", "no Ray dashboard"),
    ):
        result = subprocess.run(
            [*command, address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=without,
        )
        assert result.returncode == 2
        assert named in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
