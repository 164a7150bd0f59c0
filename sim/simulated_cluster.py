"""A modelled cluster: the production scheduler, workers, hand-over and frontend over modelled devices and links.

Runs on any asyncio loop; under sim.virtual_loop.run_virtual hours take seconds and every run is the same."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.ingress.batches.batch_job import MAX_WAIT_S
from cluster.ingress.frontend import Frontend
from cluster.instance.instance import Instance
from cluster.instance.instance_parts import InstanceParts, Role
from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.scheduler_node import SchedulerNode
from core.config import ClusterConfig, load
from core.errors import Overloaded, ReplicaLost, RequestError
from core.kv import KVLayout, KVShard
from core.ports import LayerSink, Mail
from core.types import Request, SamplingParams, Slo
from kvtransfer.inbox import Inbox
from kvtransfer.transport.base import Receiver, Sender
from kvtransfer.transport.loopback_transport import LoopbackFabric, LoopbackReceiver
from net.loopback_mail import LoopbackNetwork
from sim.cost import LinkCost, ModelledStep, StepCost
from sim.link import ModelledLink, ModelledSender
from sim.modelled import ModelledGroup
from sim.virtual_loop import LoopClock

VOCAB_SIZE = 32_000
SETTLE_S = 0.5
"""The time for all instances to register before the first arrival."""
HOST = "simulated"
STAGGER_S = 0.03
"""The time between two instances' starts, so that they register in the same order under any clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    num_prefill: int = 1
    num_decode: int = 1
    num_blocks: int = 4096
    num_layers: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    step: ModelledStep = field(default_factory=StepCost)
    link: LinkCost = field(default_factory=LinkCost)
    pairs: Mapping[tuple[str, str], LinkCost] = field(default_factory=dict[tuple[str, str], LinkCost])
    """Links of single pairs of instances, as (sender, receiver) by their mail addresses."""
    message_latency_s: float = 0.0002
    slo: Slo = field(default_factory=Slo)
    """The class of every request."""
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Overrides of ClusterConfig by dotted keys."""
    num_both: int = 0
    """Instances that do either role."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """Requests that an ingress' batch runner sends, `at_once` at a time, beside the arrivals."""

    lines: Sequence[Arrival]
    """When they would come by themselves is ignored."""
    at_once: int
    slo: Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened. `tokens[i]` and `first_token_s[i]` belong to the i-th arrival; times count from it.

    A request that was refused or could not be finished has infinite times."""

    tokens: tuple[tuple[int, ...], ...]
    first_token_s: tuple[float, ...]
    last_token_s: tuple[float, ...]
    decisions: tuple[str, ...]
    token_times_s: tuple[tuple[float, ...], ...]
    """The time of every token; where a request was not finished, of those that came."""
    batch_s: tuple[float, ...] = ()
    """When each line of the batch was answered, from the first arrival on."""


async def simulate(
    config: SimConfig,
    arrivals: Sequence[Arrival],
    kill: tuple[Role, float] | None = None,
    finished: Callable[[], None] = lambda: None,
    batch: BatchLoad | None = None,
) -> Outcome:
    """Serve the arrivals, and `batch` beside them; `kill` = (role, seconds after the start) takes the first instance of a role
    away.
    `finished` is called at each request's end.

    Raises Bug when an instance's accounting is off at the end."""
    async with contextlib.AsyncExitStack() as stack:
        cluster = _Cluster(config, stack, finished)
        await cluster.start()
        start_s = cluster.clock.now()
        if kill is not None:
            stack.push_async_callback(_cancel, asyncio.create_task(cluster.kill_later(*kill)))
        answering = None if batch is None else asyncio.create_task(cluster.serve_batch(batch, start_s))
        results = await asyncio.gather(
            *(cluster.serve(i, arrival, start_s) for i, arrival in enumerate(arrivals))
        )
        batch_s = () if answering is None else await answering
        for instance in cluster.instances:
            instance.check_integrity()
        tokens, first, last, times = zip(*results, strict=True)
        return Outcome(
            tokens=tokens,
            first_token_s=first,
            last_token_s=last,
            decisions=tuple(cluster.decisions),
            token_times_s=times,
            batch_s=batch_s,
        )


class _Cluster:
    def __init__(
        self, config: SimConfig, stack: contextlib.AsyncExitStack, finished: Callable[[], None]
    ) -> None:
        self._config, self._stack, self._finished = config, stack, finished
        self.clock = LoopClock()
        self.decisions: list[str] = []
        self.instances: list[Instance] = []
        self._settings: ClusterConfig = load(None, {}, {**config.overrides, "engine.speculate": "none"})
        self._network = LoopbackNetwork(config.message_latency_s)
        self._fabric = LoopbackFabric()
        layout = KVLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=self._settings.engine.block_size,
            dtype="bfloat16",
        )
        self._shard = KVShard.whole(layout)

    async def start(self) -> None:
        mail = self._network.join("scheduler")
        self._scheduler = mail.address
        node = SchedulerNode(
            mail, self.clock, GlobalScheduler(self._settings.schedule, log=self.decisions.append)
        )
        self._spawn(node.run())
        decodes: list[Role] = ["decode"] * self._config.num_decode
        prefills: list[Role] = ["prefill"] * self._config.num_prefill
        boths: list[Role] = ["both"] * self._config.num_both
        for role in (*decodes, *prefills, *boths):
            self._add_instance(role)
            await self.clock.sleep(STAGGER_S)
        schedule, size = self._settings.schedule, self._settings.engine.block_size
        self._frontend = Frontend(
            self._network.join("frontend"),
            self.clock,
            schedule,
            size,
            resolve_schedulers=self._resolve,
            request_timeout_s=3600.0,
        )
        self._stack.push_async_callback(self._frontend.close)
        self._spawn(self._frontend.run())
        await self.clock.sleep(SETTLE_S)

    async def serve(
        self, number: int, arrival: Arrival, start_s: float
    ) -> tuple[tuple[int, ...], float, float, tuple[float, ...]]:
        """Serve a request. Returns its tokens, when the first and the last came, and when each did."""
        await self.clock.sleep(start_s + arrival.at_s - self.clock.now())
        request = self._request(f"r{number}", arrival, self._config.slo)
        tokens: list[int] = []
        times: list[float] = []
        try:
            async for token in self._frontend.generate(request):
                tokens.append(token.token)
                times.append(self.clock.now() - start_s - arrival.at_s)
        except (Overloaded, RequestError, ReplicaLost):
            return tuple(tokens), math.inf, math.inf, tuple(times)
        finally:
            self._finished()
        return tuple(tokens), times[0], times[-1], tuple(times)

    async def serve_batch(self, batch: BatchLoad, start_s: float) -> tuple[float, ...]:
        """Return when each line is answered. As in `cluster/ingress/batches/batch_job.py`, a refused one asks again."""
        answered_s: list[float] = []
        left = iter(enumerate(batch.lines))

        async def work() -> None:
            for number, line in left:
                tries = 0
                while not await self._is_answered(self._request(f"b{number}.{tries}", line, batch.slo)):
                    tries += 1
                answered_s.append(self.clock.now() - start_s)

        await asyncio.gather(*(work() for _ in range(batch.at_once)))
        return tuple(answered_s)

    async def _is_answered(self, request: Request) -> bool:
        try:
            async for _ in self._frontend.generate(request):
                pass
        except Overloaded as refusal:
            await self.clock.sleep(min(refusal.retry_after_s, MAX_WAIT_S))
            return False
        return True

    def _request(self, id: str, arrival: Arrival, slo: Slo) -> Request:
        return Request(
            id=id,
            prompt=arrival.prompt,
            sampling=SamplingParams(temperature=1.0, seed=arrival.seed, max_tokens=arrival.max_tokens),
            reply_to=self._frontend.address,
            slo=slo,
            arrival_s=self.clock.now(),
        )

    async def kill_later(self, role: Role, delay_s: float) -> None:
        await self.clock.sleep(delay_s)
        victim = next(instance for instance in self.instances if instance.role == role)
        self.instances.remove(victim)
        await victim.close()

    def _add_instance(self, role: Role) -> None:
        mail = self._network.join(role)
        instance = Instance(self._settings, role, mail, self.clock, self._resolve, self._parts(mail))
        self.instances.append(instance)
        self._stack.push_async_callback(instance.close)
        instance.run()

    def _parts(self, mail: Mail) -> InstanceParts:
        config = self._config

        def receivers(inbox: Inbox) -> list[Receiver]:
            return [LoopbackReceiver(self._fabric, mail.address, None, inbox.may_write, inbox.arrived)]

        def senders() -> list[Sender]:
            pairs = {to: cost for (by, to), cost in config.pairs.items() if by == mail.address}
            return [ModelledSender(self._fabric, ModelledLink(self.clock, config.link, pairs))]

        def group(sink: LayerSink | None) -> ModelledGroup:
            return ModelledGroup(self.clock, config.step, config.num_layers, VOCAB_SIZE, sink)

        return InstanceParts(
            shard=self._shard,
            num_blocks=config.num_blocks,
            max_context_tokens=1 << 20,
            make_receivers=receivers,
            make_senders=senders,
            make_group=group,
            host=HOST,
        )

    async def _resolve(self) -> list[str]:
        return [self._scheduler]

    def _spawn(self, work: Any) -> None:
        self._stack.push_async_callback(_cancel, asyncio.create_task(work))


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
