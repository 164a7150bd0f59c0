"""An instance's ranks as Ray actors in its replica's placement group, and the memory servers of its other hosts or of its ranks'
GPUs. Ray places them, gives ranks GPUs and ends all of them with the replica.

No plan goes through Ray. Each actor dials its instance, and both prove that they know a secret of this start alone. From then on
a rank is what it is everywhere: a process that reads plans from its socket."""

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.deploy.kube.serving_mark import ServingMark
from cluster.deploy.process_logs import configure_logging
from cluster.deploy.rank_bundles import BundleShare, shares
from cluster.instance.instance_parts import Role
from cluster.instance.real_parts import InstancePlace
from cluster.instance.remote_memory.memory_messages import MemorySetup
from cluster.instance.remote_memory.memory_server import serve_memory
from core.config.cluster_config import ClusterConfig
from core.config.security_config import AUTO, SecurityConfig
from core.config.serve_config import ServeConfig
from core.cost.memory_model import DeviceMemory
from core.errors import ConfigError, ReplicaLost, first_line
from device.cuda import check_cupy
from engine.ranks.rank import Rank, Spawner, rank_name
from engine.ranks.rank_messages import RankSetup
from engine.ranks.rank_process import serve_instance
from engine.sizing.devices import choose_device, host_memory, memory_of
from net.channel import Channel, Identity, Listener, connect
from net.relay import plain_end
from net.socket_io import stays_on_host
from net.tls import tls_of
from parallel.mesh import Mesh

log = logging.getLogger(__name__)

_OBITUARY_S = 3.0
_PROBE_S = 120.0
"""The time for a process to start and import torch."""


def memory_at(group: Any, shares: Sequence[BundleShare]) -> list[DeviceMemory]:
    """Return what a rank with each of these shares would find on its device. Raises ConfigError."""
    asked = [
        _in_bundle(_device_memory, group, share).remote("cuda" if share.num_gpus else "cpu")
        for share in shares
    ]
    try:
        return ray.get(asked, timeout=_PROBE_S)
    except (RayError, TimeoutError) as error:
        for each in asked:
            ray.cancel(each, force=True)
        raise ConfigError(
            f"the memory of this instance's ranks' devices could not be read: {first_line(error)}"
        ) from error


@ray.remote
def _device_memory(device: str) -> DeviceMemory:
    return memory_of(choose_device(device))


MemoryAt = Callable[[Any, Sequence[BundleShare]], list[DeviceMemory]]


def rank_actors(
    config: ClusterConfig,
    role: Role,
    key: bytes,
    host: str,
    mesh: Mesh,
    *,
    memory_at: MemoryAt = memory_at,
) -> InstancePlace:
    """Return a Spawner for a replica in a placement group of its own. It listens for its ranks at `host`. `memory_at` is for
    tests. Raises ConfigError."""
    group = ray.util.get_current_placement_group()
    if group is None:
        raise ConfigError(
            f"an instance of {mesh.size} ranks needs a placement group: placement_group_bundles"
        )
    granted = shares(group.bundle_specs, mesh.size)
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    hosts = _hosts(config, role, [nodes[share.bundle] for share in granted])

    met = partial(_met, host=host, security=config.security)
    made: list[Any] = []
    """Actors of ranks that are not started yet."""

    def make_ranks() -> list[Any]:
        return [
            _in_bundle(BatonRank, group, share).remote(
                config.serve, config.security, alone=nodes[share.bundle] != hosts[0]
            )
            for share in granted
        ]

    def start(setups: Sequence[RankSetup], deadline_s: float) -> list[Rank]:
        actors = made or make_ranks()
        return met(actors, [rank_name(setup) for setup in setups], deadline_s)

    def keep(setups: Sequence[MemorySetup], deadline_s: float) -> list[Rank]:
        firsts = [next(s for s in granted if nodes[s.bundle] == hosts[setup.memory]) for setup in setups]
        actors = [
            _in_bundle(BatonMemoryServer, group, BundleShare(first.bundle, 0.0, 0)).remote(config, key)
            for first in firsts
        ]
        return met(actors, [f"the memory server of host {setup.host}" for setup in setups], deadline_s)

    def keep_on_devices(setups: Sequence[MemorySetup], deadline_s: float) -> list[Rank]:
        made.extend(make_ranks())
        actors = [
            _in_bundle(BatonMemoryServer, group, BundleShare(share.bundle, 0.0, 0), gpu).remote(config, key)
            for share, gpu in zip(granted, _gpus_of(made), strict=True)
        ]
        return met(actors, [f"the memory server of rank {rank}" for rank in range(len(setups))], deadline_s)

    devices = tuple("cuda:0" if share.num_gpus else "cpu" for share in granted)
    memories = tuple(hosts.index(nodes[share.bundle]) for share in granted)
    spawner = Spawner(
        start,
        devices,
        _device_memories(group, granted, memories, memory_at),
        memories,
        _addresses(hosts, host),
        config.security.tls != "off",
    )
    has_gpus = _have_gpus(granted)
    return InstancePlace(spawner, keep if len(hosts) > 1 else None, keep_on_devices if has_gpus else None)


def _have_gpus(granted: Sequence[BundleShare]) -> bool:
    """Return whether ranks compute on GPUs. Raises ConfigError where that needs cupy and there is none."""
    if granted[0].num_gpus:
        check_cupy()
    return bool(granted[0].num_gpus)


def _gpus_of(ranks: Sequence[Any]) -> list[str]:
    """Return which GPU Ray has given to each rank, as CUDA_VISIBLE_DEVICES says it. Raises ReplicaLost."""
    try:
        return ray.get([rank.visible_devices.remote() for rank in ranks], timeout=_PROBE_S)
    except (RayError, TimeoutError) as error:
        for rank in ranks:
            ray.kill(rank)
        raise ReplicaLost(f"a rank has not said which GPU it has: {first_line(error)}") from error


def _hosts(config: ClusterConfig, role: Role, nodes: Sequence[str]) -> list[str]:
    """Return the ids of this node and of the others that have ranks, each once. `nodes` has one for each rank. Raises
    ConfigError."""
    hosts = list(dict.fromkeys([ray.get_runtime_context().get_node_id(), *nodes]))
    pool = "prefill" if role == "prefill" else "decode"
    allowed = (config.prefill if role == "prefill" else config.decode).hosts
    if len(hosts) > allowed:
        raise ConfigError(
            f"the {len(nodes)} ranks of this instance were placed on {len(hosts)} hosts, and {pool}.hosts is {allowed}"
        )
    return hosts


def _device_memories(
    group: Any, granted: Sequence[BundleShare], hosts: Sequence[int], memory_at: MemoryAt
) -> tuple[DeviceMemory, ...]:
    """Return the memory of each rank's device. GPUs of one host are alike. Raises ConfigError."""
    if not any(hosts) and not granted[0].num_gpus:
        return (host_memory(),) * len(granted)
    numbers = sorted(set(hosts))
    found = memory_at(group, [granted[hosts.index(number)] for number in numbers])
    return tuple(found[numbers.index(number)] for number in hosts)


def _addresses(hosts: Sequence[str], own: str) -> tuple[str, ...]:
    """Return the addresses of the nodes with these ids. The first is this one."""
    found: dict[str, str] = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return own, *(found[node] for node in hosts[1:])


def _met(
    actors: Sequence[Any], names: Sequence[str], deadline_s: float, *, host: str, security: SecurityConfig
) -> list[Rank]:
    try:
        with ThreadPoolExecutor(1, "baton-rank-start") as thread:
            return thread.submit(asyncio.run, meet(actors, names, host, deadline_s, security)).result()
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise


@ray.remote(max_restarts=0)
class BatonRank:
    """A rank's process. Ray ends it with the replica that has made it."""

    def __init__(self, serve: ServeConfig, security: SecurityConfig, *, alone: bool) -> None:
        """`alone`: its replica, which says that the instance computes, is on another host. Its beats say so here."""
        configure_logging(serve.log_level, serve.log_format)
        self._security = security
        self._mark = ServingMark(os.environ if alone else {})

    def visible_devices(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def serve(self, address: str, secret: bytes, number: int) -> None:
        """Serve. Returns when the instance has ended the conversation."""
        sock = asyncio.run(dial(address, secret, number, self._security))
        serve_instance(sock, on_beat=self._mark.renew)


@ray.remote(max_restarts=0)
class BatonMemoryServer:
    """The process that keeps an instance's memory on another host than its own, or on the GPU of a rank."""

    def __init__(self, config: ClusterConfig, key: bytes) -> None:
        configure_logging(config.serve.log_level, config.serve.log_format)
        self._transfer, self._security, self._key = config.transfer, config.security, key

    def serve(self, address: str, secret: bytes, number: int) -> None:
        """Serve. Returns when the instance has ended the conversation."""
        sock = asyncio.run(dial(address, secret, number, self._security))
        serve_memory(sock, self._transfer, self._key, security=self._security)


class ActorRank:
    """An engine.ranks.rank.Rank in an actor. It also stands for a memory server."""

    def __init__(self, name: str, actor: Any, serving: Any, sock: socket.socket, pid: int) -> None:
        """`pid`: of its process, on its host."""
        self.name, self.sock = name, sock
        self._actor, self._serving, self._pid = actor, serving, pid

    def obituary(self) -> str:
        try:
            ray.get(self._serving, timeout=_OBITUARY_S)
        except TimeoutError:
            return f"{self.name} has closed its connection"
        except RayError as error:
            return f"{self.name} has died: {first_line(error)}"
        return f"{self.name} has ended"

    def end(self, patience_s: float = 0.0) -> None:
        ray.wait([self._serving], timeout=patience_s)
        if _is_here(self.sock):
            _kill_actor(self._pid)
        ray.kill(self._actor)
        with suppress(RayError, TimeoutError):
            ray.get(self._actor.__ray_ready__.remote(), timeout=_OBITUARY_S)
        self.sock.close()


def _is_here(sock: socket.socket) -> bool:
    """Return whether the other side is on this host. A local socket stands for an encrypted connection, to another one."""
    return sock.family != socket.AF_UNIX and stays_on_host(sock)


def _kill_actor(pid: int) -> None:
    """Kill the process of an actor of this module at once. Ray asks a process to end, and kills one that is stopped or stuck some
    seconds after it has called it dead."""
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        if title.startswith((b"ray::BatonRank", b"ray::BatonMemoryServer")):
            os.kill(pid, signal.SIGKILL)


def _in_bundle(kind: Any, group: Any, share: BundleShare, gpu: str = "") -> Any:
    """`gpu`: what the process sees beside what Ray gives it, from its beginning on; CUDA looks only once."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=share.bundle)
    sees = {"CUDA_VISIBLE_DEVICES": gpu, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    return kind.options(
        num_cpus=share.num_cpus,
        num_gpus=share.num_gpus,
        scheduling_strategy=strategy,
        **({"runtime_env": {"env_vars": sees}} if gpu else {}),
    )


async def meet(
    actors: Sequence[Any], names: Sequence[str], host: str, deadline_s: float, security: SecurityConfig = AUTO
) -> list[Rank]:
    """Wait until all of them have dialled. Raises ReplicaLost when one has died or is not here in time."""
    secret = secrets.token_bytes(32)
    met: dict[int, socket.socket] = {}
    pids: dict[int, int] = {}
    all_met = asyncio.Event()

    async def welcome(channel: Channel) -> None:
        number = int(channel.peer.incarnation)
        pids[number] = channel.peer.pid
        met[number] = plain_end(channel.detach())
        if len(met) == len(actors):
            all_met.set()

    listener = Listener(host, secret, welcome, _refused, tls=tls_of(security, secret))
    listener.start(Identity(listener.address, "instance", os.getpid()))
    serving = [actor.serve.remote(listener.address, secret, n) for n, actor in enumerate(actors)]
    ends = [asyncio.wrap_future(ref.future()) for ref in serving]
    waiting = asyncio.ensure_future(all_met.wait())
    why_not = "given up"
    try:
        await asyncio.wait([waiting, *ends], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        why_not = "" if len(met) == len(actors) else _why_not(names, ends, met, deadline_s)
    finally:
        for future in (waiting, *ends):  # a rank ends long after this loop
            future.cancel()
        await listener.close()
        if why_not:  # only now: until the listener was closed another rank could have come
            for sock in met.values():
                sock.close()
    if why_not:
        raise ReplicaLost(why_not)
    return [
        ActorRank(name, actor, ref, met[number], pids[number])
        for number, (name, actor, ref) in enumerate(zip(names, actors, serving, strict=True))
    ]


def _refused(why: str) -> None:
    log.warning("refused a rank: %s", why)


def _why_not(
    names: Sequence[str], ends: Sequence[asyncio.Future[Any]], met: Collection[int], deadline_s: float
) -> str:
    for name, end in zip(names, ends, strict=True):
        if end.done() and (error := end.exception()):
            return f"{name} did not start: {first_line(error)}"
    late = ", ".join(name for number, name in enumerate(names) if number not in met)
    return f"{late}: not there after {deadline_s:.0f} s"


async def dial(address: str, secret: bytes, number: int, security: SecurityConfig = AUTO) -> socket.socket:
    me, tls = Identity("", str(number), os.getpid()), tls_of(security, secret)
    channel = await connect(address, secret, me, tls=tls)
    return plain_end(channel.detach())
