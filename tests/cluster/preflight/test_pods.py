"""Nodes that nobody steers but the doctor of rank 0: what they do for it, and what they do for nobody."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from cluster.preflight.fabric import Ask
from cluster.preflight.findings import Finding, Verdict
from cluster.preflight.hydra import PROXY, run_over
from cluster.preflight.local_node import LocalNode
from cluster.preflight.pods import PodNode, address_towards, check_as_rank, checked_options
from core.errors import ConfigError
from tests.cluster.preflight.stand_ins import mpi_program, needs_mpich, put
from tests.patience import PATIENCE_S, until
from tests.ports import free_port

HOST = "127.0.0.1"
ASK = Ask(backend="gloo", mib=1)
FOUND = Finding(where="a -> b", check="KV", verdict=Verdict.WARN, measured="slow")


@asynccontextmanager
async def pod() -> AsyncGenerator[PodNode]:
    """Rank 1 of 2, as rank 0 sees it. It gets FOUND in the end."""
    address = f"{HOST}:{free_port()}"
    serving = asyncio.create_task(check_as_rank(1, 2, address, ASK, wait_s=PATIENCE_S))
    port, patience = int(address.rpartition(":")[2]), timedelta(seconds=PATIENCE_S)
    store = await asyncio.to_thread(TCPStore, HOST, port, 2, True, patience)
    node = PodNode(store, 1)
    yield node
    await node.end([FOUND])
    assert await serving == [FOUND]


async def test_a_pod_answers_and_says_what_failed_there() -> None:
    async with pod() as node:
        assert (await node.free_address()).startswith(f"{HOST}:")
        assert (await node.gpus()).count == 0
        with pytest.raises(ConfigError, match="--launcher ssh"):
            await node.run_proxy(["--launcher", "ssh"], 1.0)


@needs_mpich
async def test_programs_run_over_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, monkeypatch, "stand_in", mpi_program(tmp_path, "its output"))
    async with pod() as node:
        ended = await run_over([LocalNode(), node], ["stand_in"], HOST, PATIENCE_S)
    assert "ranks: 2" in ended.out


async def test_a_pod_is_asked_again_while_it_does_what_nobody_waits_for_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = tmp_path / "begun", tmp_path / "may end"
    os.mkfifo(may_end)
    put(tmp_path, monkeypatch, PROXY, f"#!/bin/sh\ntouch {begun}\ncat '{may_end}'\n")
    async with asyncio.timeout(PATIENCE_S), pod() as node:
        running = asyncio.create_task(node.run_proxy([], PATIENCE_S))
        await until(begun.exists)
        running.cancel()
        await asyncio.wait([running])
        asked = asyncio.create_task(node.gpus())
        await asyncio.sleep(0)
        with may_end.open("w"):
            pass
        assert (await asked).count == 0


async def test_a_rank_that_stays_alone_says_so() -> None:
    address = f"{HOST}:{free_port()}"
    (finding,) = await check_as_rank(1, 2, address, ASK, wait_s=1.0)
    assert (finding.where, finding.verdict) == ("rank 1", Verdict.FAIL)


def test_a_proxy_connects_to_nobody_but_rank_0() -> None:
    options = ["--control-port", "evil.example:42807", "--rmk", "user", "--proxy-id", "1", "--usize", "-1"]
    assert checked_options(options, "pod-0.preflight:29500") == [
        "--control-port",
        "pod-0.preflight:42807",
        *options[2:],
    ]


@pytest.mark.parametrize(
    "options",
    [
        ["--launcher", "ssh"],
        ["--launcher-exec", "/bin/sh"],
        ["--proxy-id", "$(id)"],
        ["--control-port", "a:b"],
    ],
)
def test_options_that_no_check_has_are_refused(options: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"a proxy is not run with {options[0]}"):
        checked_options(options, "pod-0.preflight:29500")


def test_where_others_reach_this_node_is_where_it_reaches_them() -> None:
    assert address_towards("127.0.0.1:29500") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no.such.host.invalid"):
        address_towards("no.such.host.invalid:29500")
