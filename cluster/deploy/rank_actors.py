"""An instance's ranks as Ray actors in its replica's placement group: Ray places them, gives them GPUs and ends them with it.

No plan goes through Ray: each actor dials its instance, both prove that they know a secret of this start alone, and from then on
a rank is what it is everywhere, a process that reads plans from its socket."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.deploy.bundles import STRATEGY, Share, shares
from core.errors import ConfigError, ReplicaLost
from engine.ranks.process import serve_instance
from engine.ranks.rank import Rank, Spawner, rank_name
from engine.ranks.wire import RankSetup
from net.channel import Channel, Identity, Listener, connect
from parallel.mesh import Mesh

log = logging.getLogger(__name__)

_OBITUARY_S = 3.0


def rank_actors(host: str, mesh: Mesh) -> Spawner:
    """For a replica in a placement group of its own; it listens for its ranks at `host`. Raises ConfigError."""
    group = ray.util.get_current_placement_group()
    if group is None:
        raise ConfigError(
            f"an instance of {mesh.size} ranks needs a placement group: placement_group_bundles"
        )
    granted = shares(group.bundle_specs, mesh.size)
    hosts: set[str] = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    if len(hosts) > 1:
        raise ConfigError(
            f"the {mesh.size} ranks of this instance were placed on {len(hosts)} hosts, and their KV lies in the memory of one: "
            f"set placement_group_strategy: {STRATEGY}"
        )

    def start(setups: Sequence[RankSetup], deadline_s: float) -> list[Rank]:
        actors = [_actor(group, share) for share in granted]
        try:
            with ThreadPoolExecutor(1, "baton-rank-start") as thread:
                return thread.submit(asyncio.run, meet(actors, setups, host, deadline_s)).result()
        except BaseException:
            for actor in actors:
                ray.kill(actor)
            raise

    return Spawner(start, tuple("cuda:0" if share.num_gpus else "cpu" for share in granted))


@ray.remote(max_restarts=0)
class BatonRank:
    """A rank's process. Ray ends it with the replica that has made it."""

    def serve(self, address: str, secret: bytes, number: int) -> None:
        """Returns when the instance has ended the conversation."""
        serve_instance(asyncio.run(dial(address, secret, number)))


class ActorRank:
    """engine.ranks.rank.Rank."""

    def __init__(self, name: str, actor: Any, serving: Any, sock: socket.socket) -> None:
        self.name, self.sock = name, sock
        self._actor, self._serving = actor, serving

    def obituary(self) -> str:
        try:
            ray.get(self._serving, timeout=_OBITUARY_S)
        except TimeoutError:
            return f"{self.name} has closed its connection"
        except RayError as error:
            return f"{self.name} has died: {_first_line(error)}"
        return f"{self.name} has ended"

    def end(self, patience_s: float = 0.0) -> None:
        ray.wait([self._serving], timeout=patience_s)
        ray.kill(self._actor)
        with suppress(RayError, TimeoutError):
            ray.get(self._actor.__ray_ready__.remote(), timeout=_OBITUARY_S)
        self.sock.close()


def _actor(group: Any, share: Share) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=share.bundle)
    return BatonRank.options(
        num_cpus=share.num_cpus, num_gpus=share.num_gpus, scheduling_strategy=strategy
    ).remote()


async def meet(
    actors: Sequence[Any], setups: Sequence[RankSetup], host: str, deadline_s: float
) -> list[Rank]:
    """All of them have dialled. Raises ReplicaLost when one has died or is not here in time."""
    secret = secrets.token_bytes(32)
    met: dict[int, socket.socket] = {}
    all_met = asyncio.Event()

    async def welcome(channel: Channel) -> None:
        met[int(channel.peer.incarnation)] = channel.detach()
        if len(met) == len(actors):
            all_met.set()

    listener = Listener(host, secret, welcome, lambda why: log.warning("refused a rank: %s", why))
    listener.start(Identity(listener.address, "instance", os.getpid()))
    serving = [actor.serve.remote(listener.address, secret, n) for n, actor in enumerate(actors)]
    ends = [asyncio.wrap_future(ref.future()) for ref in serving]
    waiting = asyncio.ensure_future(all_met.wait())
    why_not = "given up"
    try:
        await asyncio.wait([waiting, *ends], timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        why_not = "" if len(met) == len(actors) else _why_not(setups, ends, met, deadline_s)
    finally:
        for future in (waiting, *ends):  # a rank ends long after this loop
            future.cancel()
        await listener.close()
        if why_not:  # now that nobody comes any more
            for sock in met.values():
                sock.close()
    if why_not:
        raise ReplicaLost(why_not)
    return [
        ActorRank(rank_name(setup), actor, ref, met[number])
        for number, (setup, actor, ref) in enumerate(zip(setups, actors, serving, strict=True))
    ]


def _why_not(
    setups: Sequence[RankSetup], ends: Sequence[asyncio.Future[Any]], met: Collection[int], deadline_s: float
) -> str:
    for setup, end in zip(setups, ends, strict=True):
        if end.done() and (error := end.exception()):
            return f"{rank_name(setup)} did not start: {_first_line(error)}"
    late = ", ".join(rank_name(setup) for number, setup in enumerate(setups) if number not in met)
    return f"{late}: not there after {deadline_s:.0f} s"


async def dial(address: str, secret: bytes, number: int) -> socket.socket:
    channel = await connect(address, secret, Identity("", str(number), os.getpid()))
    return channel.detach()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
