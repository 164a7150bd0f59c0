"""A modelled cluster: the production scheduler, workers, hand-over and frontend over modelled devices and links.

Runs on any asyncio loop; under sim.virtual_loop.run_virtual hours take seconds and every run is the same."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from cluster.ingress.batches.batch_job import MAX_WAIT_S
from cluster.ingress.delivery.frontend import Frontend
from cluster.instance.instance_parts import Role
from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.scheduler_node import SchedulerNode
from core.config.cluster_config import ClusterConfig, load
from core.errors import Overloaded, ReplicaLost, RequestError
from core.types import Request, SamplingParams, Slo
from net.loopback_mail import LoopbackNetwork
from sim.fleet_changes import InstanceLife, SimulatedPools, carry_out, pool_roles
from sim.simulated_fleet import SimulatedFleet
from sim.simulated_run import SETTLE_S, STAGGER_S, Arrival, BatchLoad, Outcome, SimConfig
from sim.tenants import TenantGate
from sim.virtual_loop import LoopClock


async def simulate(
    config: SimConfig,
    arrivals: Sequence[Arrival],
    finished: Callable[[], None] = lambda: None,
    batch: BatchLoad | None = None,
) -> Outcome:
    """Serve the arrivals, and `batch` beside them. `finished` is called at each request's end.

    Raises Bug when an instance's accounting is off at the end."""
    async with contextlib.AsyncExitStack() as stack:
        cluster = _Cluster(config, stack, finished, arrivals)
        await cluster.start()
        answering = None if batch is None else asyncio.create_task(cluster.serve_batch(batch))
        results = await asyncio.gather(
            *(cluster.serve(number, arrival) for number, arrival in enumerate(arrivals))
        )
        batch_s = () if answering is None else await answering
        cluster.fleet.check_integrity()
        tokens, first, last, times, arrived = zip(*results, strict=True)
        return Outcome(
            tokens=tokens,
            first_token_at=first,
            last_token_at=last,
            decisions=tuple(cluster.decisions),
            token_times=times,
            batch_s=batch_s,
            arrived_at=arrived,
            lives=tuple(cluster.fleet.lives),
        )


class _Cluster:
    def __init__(
        self,
        config: SimConfig,
        stack: contextlib.AsyncExitStack,
        finished: Callable[[], None],
        arrivals: Sequence[Arrival],
    ) -> None:
        self._config, self._stack, self._finished = config, stack, finished
        self.clock = LoopClock()
        self.decisions: list[str] = []
        self._settings: ClusterConfig = load(None, {}, {**config.overrides, "engine.speculate": "none"})
        self._network = LoopbackNetwork(config.message_latency_s)
        self.fleet = SimulatedFleet(config, self._settings, self._network, self.clock, self._resolve)
        stack.push_async_callback(self.fleet.close)
        self._gate = None if config.tenants is None else TenantGate(config.tenants)
        loop = asyncio.get_running_loop()
        followed = {arrival.follows for arrival in arrivals if arrival.follows is not None}
        self._ended: dict[int, asyncio.Future[tuple[tuple[int, ...], tuple[int, ...], float]]] = {
            number: loop.create_future() for number in followed
        }
        """The prompt as it was sent, the answer, and when it ended, for arrivals that others follow."""
        self._start_at = 0.0

    async def start(self) -> None:
        nodes = self._start_schedulers(self._settings.serve.schedulers)
        decodes: list[Role] = ["decode"] * self._config.num_decode
        prefills: list[Role] = ["prefill"] * self._config.num_prefill
        boths: list[Role] = ["both"] * self._config.num_both
        for role in (*decodes, *prefills, *boths):
            self.fleet.start_instance(InstanceLife(role, 0.0))
            await self.clock.sleep(STAGGER_S)
        self._frontends = [
            self._start_frontend(f"frontend{number or ''}") for number in range(self._config.num_ingresses)
        ]
        await self.clock.sleep(SETTLE_S)
        self._start_at = self.fleet.start_at = self.clock.now()
        self._change_fleet(nodes[0])

    def _start_schedulers(self, count: int) -> list[SchedulerNode]:
        mails = [self._network.join(f"scheduler{number or ''}") for number in range(count)]
        self._schedulers = [mail.address for mail in mails]
        nodes: list[SchedulerNode] = []
        for mail in mails:
            scheduler = GlobalScheduler(self._settings.schedule, log=self.decisions.append)
            resolve = self._resolve if count > 1 else None
            nodes.append(SchedulerNode(mail, self.clock, scheduler, resolve, count))
            self._spawn(nodes[-1].run())
        return nodes

    def _start_frontend(self, name: str) -> Frontend:
        frontend = Frontend(
            self._network.join(name),
            self.clock,
            self._settings.schedule,
            self._settings.engine.block_size,
            resolve_schedulers=self._resolve,
            request_timeout_s=3600.0,
            num_schedulers=self._settings.serve.schedulers,
        )
        self._stack.push_async_callback(frontend.close)
        self._spawn(frontend.run())
        return frontend

    def _change_fleet(self, node: SchedulerNode) -> None:
        """Let fail what shall fail, and the load size pools where it shall."""
        config, pools = self._config, None
        if config.cold_start_s is not None:
            pools = SimulatedPools(
                self.fleet,
                self.clock,
                roles=pool_roles(config.num_prefill, config.num_both),
                cold_start_s=config.cold_start_s,
                spawn=self._spawn,
            )
            self._spawn(pools.autoscaler(self._settings.scaling, node))
        for failure in config.failures:
            replace = _nobody if pools is None else pools.replace
            self._spawn(carry_out(failure, self.fleet, self.clock, self._start_at, replace))

    async def serve(
        self, number: int, arrival: Arrival
    ) -> tuple[tuple[int, ...], float, float, tuple[float, ...], float]:
        """Serve a request. Returns its tokens, when the first and the last came and each did, all from its arrival on, and when
        it arrived."""
        if arrival.follows is not None:
            arrival = arrival.after(*await self._ended[arrival.follows])
        await self.clock.sleep(self._start_at + arrival.at - self.clock.now())
        frontend = self._frontends[number % len(self._frontends)]
        request = self._request(frontend, f"r{number}", arrival, self._config.slo)
        tokens: list[int] = []
        times: list[float] = []
        try:
            async for token in self._let_in(frontend, request):
                tokens.append(token)
                times.append(self.clock.now() - self._start_at - arrival.at)
            first_at, last_at = times[0], times[-1]
        except (Overloaded, RequestError, ReplicaLost):
            first_at = last_at = math.inf
        self._finished()
        if (ended := self._ended.get(number)) is not None:
            ended.set_result((arrival.prompt, tuple(tokens), self.clock.now() - self._start_at))
        return tuple(tokens), first_at, last_at, tuple(times), arrival.at

    async def _let_in(self, frontend: Frontend, request: Request) -> AsyncGenerator[int, None]:
        """Yield its tokens, if its tenant may ask for them now, and let the tenant pay. Raises as the frontend does."""
        gate, tenant = self._gate, request.tenant
        if gate is None:
            async for token in frontend.generate(request):
                yield token.token
            return
        if excess := gate.begin(tenant, len(request.prompt), self.clock.now()):
            raise Overloaded(excess.reason, excess.retry_after_s)
        try:
            async for token in frontend.generate(request):
                gate.spend(tenant, 1, self.clock.now())
                yield token.token
        finally:
            gate.end(tenant)

    async def serve_batch(self, batch: BatchLoad) -> tuple[float, ...]:
        """Return when each line is answered. As in `cluster/ingress/batches/batch_job.py`, a refused one asks again."""
        answered_at, frontend = list[float](), self._frontends[0]
        left = iter(enumerate(batch.lines))

        async def work() -> None:
            for number, line in left:
                tries = 0
                while not await self._is_answered(
                    frontend, self._request(frontend, f"b{number}.{tries}", line, batch.slo)
                ):
                    tries += 1
                answered_at.append(self.clock.now() - self._start_at)

        await asyncio.gather(*(work() for _ in range(batch.at_once)))
        return tuple(answered_at)

    async def _is_answered(self, frontend: Frontend, request: Request) -> bool:
        try:
            async for _ in frontend.generate(request):
                pass
        except Overloaded as refusal:
            await self.clock.sleep(min(refusal.retry_after_s, MAX_WAIT_S))
            return False
        return True

    def _request(self, frontend: Frontend, id: str, arrival: Arrival, slo: Slo) -> Request:
        request = Request(
            id=id,
            prompt=arrival.prompt,
            sampling=SamplingParams(temperature=1.0, seed=arrival.seed, max_tokens=arrival.max_tokens),
            reply_to=frontend.address,
            slo=slo,
            arrival_at=self.clock.now(),
            tenant=arrival.tenant,
        )
        return request if self._config.tenants is None else self._config.tenants.named(request)

    async def _resolve(self) -> list[str]:
        return self._schedulers

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._stack.push_async_callback(_cancel, asyncio.create_task(work))


def _nobody(_: Role) -> None:
    """Replace a lost instance by none."""


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
