"""How an instance meets the ranks that Ray has placed; what those are for is shown by tests/e2e/test_meshes.py on a real Ray."""

import asyncio
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import ray.util
from ray.exceptions import RayActorError

from cluster.deploy import rank_actors as module
from cluster.deploy.rank_actors import ActorRank, dial, meet, rank_actors
from cluster.deploy.rank_bundles import BundleShare
from cluster.instance.real_parts import InstancePlace
from core.config.cluster_config import load
from core.cost.memory_model import DeviceMemory
from core.errors import ConfigError, ProtocolError, ReplicaLost
from device import cuda
from parallel.mesh import Mesh
from tests.far_host import FAR

NAMES = ["rank 0 of 2", "rank 1 of 2"]
Serve = Callable[[str, bytes, int], None]
NOTHING: Any = None
"""A setup, which nobody looks at before it is sent."""
SETUP: Any = SimpleNamespace(rank=0, mesh=Mesh(pp=2))


class Actor:
    """As Ray's handle of one whose `serve` is the given function, on a thread."""

    def __init__(self, serve: Serve) -> None:
        self.serve = SimpleNamespace(remote=self._remote)
        self._serve = serve

    def _remote(self, address: str, secret: bytes, number: int) -> Any:
        future: Future[None] = Future()

        def run() -> None:
            try:
                self._serve(address, secret, number)
            except Exception as error:
                if not future.done():  # as Ray does
                    future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return SimpleNamespace(future=lambda: future)


def greets(address: str, secret: bytes, number: int) -> None:
    with asyncio.run(dial(address, secret, number)) as sock:
        sock.sendall(bytes([number]))


def is_silent(address: str, secret: bytes, number: int) -> None:
    pass


def dies(address: str, secret: bytes, number: int) -> None:
    raise RayActorError(error_msg="The actor died.\nOf what is a long story.")


def is_a_stranger(address: str, secret: bytes, number: int) -> None:
    with pytest.raises((ReplicaLost, ProtocolError)):
        greets(address, b"another start's", number)


@pytest.mark.parametrize("host", ["127.0.0.1", FAR])
async def test_each_socket_is_that_of_its_rank(host: str) -> None:
    ranks = await meet([Actor(greets), Actor(greets)], NAMES, host, 20)
    assert [rank.name for rank in ranks] == NAMES
    for number, rank in enumerate(ranks):
        assert rank.sock.recv(1) == bytes([number])
        rank.sock.close()


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (is_silent, "rank 1 of 2: not there after 1 s"),
        (is_a_stranger, "rank 1 of 2: not there after 1 s"),
        (dies, r"rank 1 of 2 did not start: The actor died\.$"),
    ],
)
async def test_all_or_none_within_the_deadline(second: Serve, why: str) -> None:
    with pytest.raises(ReplicaLost, match=why):
        await meet([Actor(greets), Actor(second)], NAMES, "127.0.0.1", 1.0)


def place(
    monkeypatch: pytest.MonkeyPatch, hosts: list[str], num_hosts: int = 1, *, has_cupy: bool = True
) -> InstancePlace:
    """As in a replica on host a whose placement group has a bundle on each of these hosts; none: it has no group."""
    group = SimpleNamespace(bundle_specs=[{"CPU": 1.0, "GPU": 1.0} for _ in hosts]) if hosts else None
    table = {"bundles_to_node_id": dict(enumerate(hosts))}
    nodes = [{"NodeID": host, "NodeManagerAddress": f"address of {host}"} for host in "abc"]
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: group)
    monkeypatch.setattr(ray.util, "placement_group_table", lambda _: table)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(cuda, "has_cupy", lambda: has_cupy)
    config = load(None, {}, {"decode.pp": len(hosts) or 2, "decode.hosts": num_hosts})

    def memory_at(group: Any, shares: Sequence[BundleShare]) -> list[DeviceMemory]:
        return [
            DeviceMemory(name=hosts[share.bundle], total_bytes=1, free_bytes=1, is_host=False)
            for share in shares
        ]

    mesh = Mesh(pp=len(hosts) or 2)
    return rank_actors(config, "decode", b"key", "127.0.0.1", mesh, memory_at=memory_at)


def test_ranks_on_one_host_see_the_gpu_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = place(monkeypatch, ["a", "a"])
    assert placement.ranks.devices == ("cuda:0", "cuda:0")
    assert (placement.ranks.memories, placement.keep) == ((0, 0), None)


def test_ranks_on_other_hosts_have_their_memory_and_address_there(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = place(monkeypatch, ["a", "c", "a", "b"], 3)
    assert placement.ranks.memories == (0, 1, 0, 2)
    assert [memory.name for memory in placement.ranks.memory] == ["a", "c", "a", "b"]
    assert placement.ranks.addresses == ("127.0.0.1", "address of c", "address of b")
    assert placement.keep is not None


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ([], "an instance of 2 ranks needs a placement group"),
        (["a", "b"], "the 2 ranks of this instance were placed on 2 hosts, and decode.hosts is 1"),
    ],
)
def test_what_ray_has_placed_otherwise_is_refused(
    hosts: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=why):
        place(monkeypatch, hosts)


class GpuActors:
    """In place of an actor's class: notes what its actors ask for. Each says that it has a GPU of its own number."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def options(self, **asked: Any) -> Any:
        return SimpleNamespace(remote=lambda *_, **__: self._made(asked))

    def _made(self, asked: dict[str, Any]) -> Actor:
        actor, gpu = Actor(greets), f"GPU-{len(self.asked)}"
        self.asked.append(asked)
        actor.visible_devices = SimpleNamespace(remote=lambda: gpu)  # type: ignore[attr-defined]
        return actor


def test_memory_servers_see_the_gpus_of_their_ranks_and_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, servers = GpuActors(), GpuActors()
    monkeypatch.setattr(module, "BatonRank", ranks)
    monkeypatch.setattr(module, "BatonMemoryServer", servers)
    monkeypatch.setattr(ray, "get", lambda refs, timeout: list(refs))
    placement = place(monkeypatch, ["a", "a"])
    assert placement.keep is None
    assert placement.keep_on_devices is not None
    kept = placement.keep_on_devices([NOTHING, NOTHING], 20)
    assert [server.name for server in kept] == ["the memory server of rank 0", "the memory server of rank 1"]
    assert [asked["num_gpus"] for asked in ranks.asked] == [1, 1]
    assert [asked["num_gpus"] for asked in servers.asked] == [0, 0]
    seen = [asked["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for asked in servers.asked]
    assert seen == ["GPU-0", "GPU-1"]
    started = placement.ranks.start([SETUP, SETUP], 20)
    assert len(ranks.asked) == 2, "those whose GPUs the memory servers see"
    for number, each in enumerate([*kept, *started]):
        assert each.sock.recv(1) == bytes([number % 2])
        each.sock.close()


@pytest.mark.parametrize(("title", "ends"), [("ray::BatonRank.serve", True), ("somebody else's", False)])
def test_a_rank_on_this_host_that_is_stopped_ends_at_once(
    title: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray says that its process is dead, and kills it seconds later. Its number may be another process's by then."""
    ready = SimpleNamespace(remote=lambda: None)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: None)
    monkeypatch.setattr(ray, "get", lambda ref, timeout: None)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        subprocess.Popen([title, "1000"], executable="sleep") as process,
    ):
        try:
            while psutil.Process(process.pid).cmdline()[:1] != [title]:
                time.sleep(0.01)  # it is only forked yet
            process.send_signal(signal.SIGSTOP)
            ActorRank("rank 0", SimpleNamespace(__ray_ready__=ready), None, ours, process.pid).end()
            assert (_returned(process) == -signal.SIGKILL) == ends
        finally:
            process.kill()


def _returned(process: "subprocess.Popen[bytes]") -> int | None:
    try:
        return process.wait(2.0)
    except subprocess.TimeoutExpired:
        return None


def test_ranks_on_gpus_are_refused_where_there_is_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"through cupy, which is not installed: pip install cupy-cuda13x"):
        place(monkeypatch, ["a", "a"], has_cupy=False)
