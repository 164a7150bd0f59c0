"""The same scheduler, workers and frontend in one process: for embedded use, and as the reference that the cluster must equal."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import uvloop

from cluster.ingress.api_factory import (
    ModelBehind,
    build_app_of,
    close_store,
    door_observers,
    run_batches,
)
from cluster.ingress.delivery.frontend import Frontend
from cluster.ingress.http.connection_limits import connection_limits
from cluster.ingress.http.draining import drain
from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.http.ingress_tls import follow_certificate, ingress_tls
from cluster.ingress.model_card import ModelCard
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.telemetry.timeline import Observe, nobody
from cluster.ingress.tenants.live_rules import LiveRules
from cluster.instance.instance import Instance
from cluster.instance.instance_parts import AsleepParts, InstanceParts, Role, made_aside
from cluster.instance.kept_instances import KeptInstances
from cluster.instance.real_parts import asleep_local_parts, local_parts
from cluster.instance.resident_instance import ResidentInstance
from cluster.local_group import LocalGroup, check_seat, local_groups
from cluster.scheduler.kept_adapters import kept_adapters
from cluster.scheduler.recorded_scheduler import make_scheduler
from cluster.scheduler.scheduler_node import SchedulerNode
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig, EngineConfig
from core.config.device_transport import check_device_transport
from core.config.model_rows import slug
from core.errors import ConfigError, ReplicaLost
from core.garbage import leave_out_all_there_is
from core.ports import Mail, Resolve
from core.reports import PoolStatus, Status
from engine.sizing.devices import choose_device
from kvtransfer.transport.loopback_transport import LoopbackFabric
from models.files.hub import resolve as find_model
from net.loopback_mail import LoopbackNetwork

M = TypeVar("M", bound=Mail)
_START_TIMEOUT_S = 300.0
_LOOK_EVERY_S = 0.05


class LocalCluster:
    """All parts of a cluster on one event loop. Use `async with LocalCluster.running(config)`."""

    def __init__(self, frontend: Frontend, kept: KeptInstances[ResidentInstance]) -> None:
        self.frontend, self._kept = frontend, kept

    @property
    def instances(self) -> list[Instance]:
        """The instances that do not sleep."""
        return [one.instance for one in self._kept.running if one.instance is not None]

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls,
        config: ClusterConfig,
        observe: Observe = nobody,
        *,
        replaces_instances: bool = False,
        prefix: str = "",
        group: LocalGroup | None = None,
    ):
        """Yield a cluster that is started and ready. Everything is given back after the block. `replaces_instances`: another one
        takes the place of an instance whose engine has failed, unless they keep failing. `prefix`: of its addresses. `group`:
        with whose models it shares memory."""
        if config.serve.schedulers > 1:
            raise ConfigError("serve.schedulers needs Ray: one process has one scheduler")
        if config.scaling.enabled:
            raise ConfigError("scaling.enabled needs Ray: instances in one process do not come and go")
        config = _on_its_device(config.only)
        check_seat(config, group)
        network, fabric = LoopbackNetwork(prefix=prefix), LoopbackFabric()
        folder = find_model(config.model.path)

        def parts(role: Role, mail: Mail) -> InstanceParts | AsleepParts:
            make = local_parts if group is None else asleep_local_parts
            return make(config, folder, role, mail, fabric)

        async with cls.assembled(
            config, network.join, parts, observe, replaces_instances=replaces_instances, group=group
        ) as cluster:
            yield cluster

    @classmethod
    @contextlib.asynccontextmanager
    async def assembled(
        cls,
        config: ClusterConfig,
        join: Callable[[str], M],
        parts: Callable[[Role, M], InstanceParts | AsleepParts],
        observe: Observe = nobody,
        *,
        replaces_instances: bool = False,
        group: LocalGroup | None = None,
    ):
        """Yield a cluster as `running` does. Each part gets its mail from `join`, which is told what the part is."""
        clock = WallClock()
        async with contextlib.AsyncExitStack() as stack:
            scheduler_mail = join("scheduler")
            stack.push_async_callback(scheduler_mail.close)
            listed = await kept_adapters(config)
            node = SchedulerNode(scheduler_mail, clock, make_scheduler(config.schedule), kept_adapters=listed)
            await _run_scheduler(stack, node, config, group)

            async def resolve() -> list[str]:
                return [scheduler_mail.address]

            make = _InstanceMaker(config, clock, join, parts, resolve)
            rest = make if group else None
            kept = KeptInstances(make, clock, node.show_trouble, replaces=replaces_instances, rest=rest)
            stack.push_async_callback(kept.close)
            for role in _roles(config):
                await kept.start(role)
            frontend = _frontend(config, join("frontend"), clock, resolve, observe)
            stack.push_async_callback(frontend.close)
            stack.push_async_callback(_cancel, asyncio.create_task(frontend.run()))
            cluster = cls(frontend, kept)
            await cluster.wait_ready()
            make.serves = True
            yield cluster

    async def wait_ready(self) -> Status:
        """Wait until every instance has registered."""
        async with asyncio.timeout(_START_TIMEOUT_S):
            while True:
                with contextlib.suppress(ReplicaLost):
                    status = await self.frontend.status()
                    if len(status.instances) + len(status.sleepers) >= len(self._kept.running):
                        return status
                await asyncio.sleep(0.005)

    async def serving(self) -> None:
        """Wait for instances that take the place of others, if no request could be answered without. Raises ReplicaLost where
        none will."""
        while True:
            given_up = self._kept.given_up  # before the look, which says why then
            ready, why_not = await self.frontend.ready()
            if ready:
                return
            if given_up:
                raise ReplicaLost(why_not)
            await asyncio.sleep(_LOOK_EVERY_S)


class _InstanceMaker(Generic[M]):
    """Makes the cluster's instances, at the start and in the place of others."""

    def __init__(
        self,
        config: ClusterConfig,
        clock: WallClock,
        join: Callable[[str], M],
        parts: Callable[[Role, M], InstanceParts | AsleepParts],
        resolve: Resolve,
    ) -> None:
        self._config, self._clock, self._resolve = config, clock, resolve
        self._join, self._parts = join, parts
        self.serves = False
        """Whether requests run beside, so that nothing may stop the event loop."""

    async def __call__(self, role: Role, rests: str = "") -> ResidentInstance:
        """Make one that runs. `rests` as in `ResidentInstance`."""
        mail = self._join(role)
        try:
            own = await self._made_aside(role, mail) if self.serves else self._parts(role, mail)
            instance = ResidentInstance(
                self._config, role, mail, self._clock, self._resolve, own, rests=rests
            )
        except BaseException:
            await mail.close()
            raise
        instance.run()
        return instance

    async def _made_aside(self, role: Role, mail: M) -> InstanceParts | AsleepParts:
        """Return an instance's parts, made on a thread with the model of the only rank. The loop waits for several ranks, which
        load theirs in processes of their own."""
        make = partial(self._parts, role, mail)
        if (self._config.prefill if role == "prefill" else self._config.decode).num_ranks > 1:
            return await asyncio.to_thread(make)
        return await made_aside(make)


def _roles(config: ClusterConfig) -> list[Role]:
    """Return those of all instances."""
    decodes: list[Role] = ["both" if config.any_role else "decode"] * config.decode_instances
    prefills: list[Role] = ["prefill"] * config.prefill_instances
    return decodes + prefills


def _frontend(
    config: ClusterConfig, mail: Mail, clock: WallClock, resolve: Resolve, observe: Observe
) -> Frontend:
    return Frontend(
        mail,
        clock,
        config.schedule,
        config.engine.block_size,
        resolve_schedulers=resolve,
        request_timeout_s=config.serve.request_timeout_s,
        observe=observe,
        loads_adapters=bool(config.adapters.folders),
    )


async def _run_scheduler(
    stack: contextlib.AsyncExitStack, node: SchedulerNode, config: ClusterConfig, group: LocalGroup | None
) -> None:
    node.show_pools(_sizes(config))
    stack.push_async_callback(_cancel, asyncio.create_task(node.run()))
    if group is not None:
        await stack.enter_async_context(group.seat(node, config))


def _sizes(config: ClusterConfig) -> tuple[PoolStatus, ...]:
    sizes = {"decode": config.decode_instances, "prefill": config.prefill_instances}
    return tuple(PoolStatus(pool=pool, wanted=size) for pool, size in sizes.items() if size)


def _on_its_device(config: ClusterConfig) -> ClusterConfig:
    """Return the configuration with `cuda` in place of `auto` where this process has a GPU, so that steps get a GPU's sizes."""
    if config.engine.device != "auto":
        return config
    if choose_device("auto").type == "cpu":
        check_device_transport(config.transfer.transport, "auto", "cpu")
        return config
    said = config.engine.model_dump(exclude_unset=True)
    return config.model_copy(update={"engine": EngineConfig.model_validate(said | {"device": "cuda"})})


def serve_local(
    config: ClusterConfig,
    cards: Sequence[ModelCard],
    on_ready: Callable[[], None],
    on_stop: Callable[[], None],
) -> None:
    """Serve HTTP on one event loop until SIGINT or SIGTERM. Running requests finish first. `cards`: one for each of
    `config.rows`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, cards, on_ready, on_stop))


@contextlib.asynccontextmanager
async def local_models(config: ClusterConfig, cards: Sequence[ModelCard]):
    """Yield each model of the configuration, and its own cluster, which is started and ready."""
    async with contextlib.AsyncExitStack() as stack:
        models: list[tuple[ModelBehind, LocalCluster]] = []
        groups = await stack.enter_async_context(local_groups(config))
        for row, card in zip(config.rows, cards, strict=True):
            observers = make_observers(card.name, config.serve.otlp_endpoint)
            stack.callback(observers.close)
            prefix = f"{slug(card.name)}/" if config.models else ""
            group = groups.get(row.schedule.residency.group)
            running = LocalCluster.running(
                row, observers.observe, replaces_instances=True, prefix=prefix, group=group
            )
            cluster: LocalCluster = await stack.enter_async_context(running)
            model = ModelBehind(generator=cluster.frontend, config=row, card=card, observers=observers)
            models.append((model, cluster))
        yield models


async def _serve(
    config: ClusterConfig,
    cards: Sequence[ModelCard],
    on_ready: Callable[[], None],
    on_stop: Callable[[], None],
) -> None:
    tls, live = ingress_tls(config.serve), LiveRules(config)
    leave_out_all_there_is()
    async with local_models(config, cards) as running:
        models = [model for model, _ in running]
        observers = door_observers(config, models)
        app = build_app_of(models, config, live.access, observers)
        limits = connection_limits(config.serve)
        server = HttpServer(app, config.serve.host, [config.serve.port], shared=False, tls=tls, limits=limits)
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        serving, watching = server.start(), asyncio.create_task(live.run(observers.ingress.rules_changed))
        following = asyncio.create_task(follow_certificate(tls, config.serve))
        batches = asyncio.create_task(run_batches(app))
        on_ready()
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        on_stop()
        for task in (watching, following, batches):
            await _cancel(task)
        frontends = [cluster.frontend for _, cluster in running]
        await drain(frontends, server, config.serve.drain_notice_s, config.serve.drain_timeout_s)
        await close_store(app)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
