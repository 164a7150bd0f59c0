"""Instances of a real model in one process, which a scripted scheduler places on."""

import asyncio
import contextlib
import threading
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cluster.ingress.delivery.frontend import Frontend
from cluster.ingress.telemetry.timeline import Observe, nobody
from cluster.instance.instance import Instance
from cluster.instance.real_parts import local_parts
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig, load
from core.messages import Message, NeedPrefill, PlaceReply, PlaceRequest, PrefillAssigned
from core.plan import StepPlan, StepResult
from core.ports import DeviceWork, LayerDone, LayerSink, WorkerGroup
from core.reports import LoadReport
from core.types import STANDARD, Request, Route, SamplingParams, Slo
from kvtransfer.transport.loopback_transport import LoopbackFabric
from net.loopback_mail import LoopbackNetwork
from tests.even_steps import with_even_steps
from tests.patience import PATIENCE_S


class Breakable:
    """A WorkerGroup whose steps fail with `error`, once it is given."""

    def __init__(self, group: WorkerGroup) -> None:
        self.error: Exception | None = None
        self.on_ready, self.hold_adapters, self.lost, self.give_up, self.close, self._execute = (
            group.on_ready,
            group.hold_adapters,
            group.lost,
            group.give_up,
            group.close,
            group.execute,
        )

    async def execute(self, plan: StepPlan) -> StepResult:
        result = await self._execute(plan)
        if self.error is not None:
            raise self.error
        return result


class Scarce:
    """A LayerSink in whose steps memory may run out, or the compute thread hang."""

    def __init__(self, sink: LayerSink) -> None:
        self._sink, self._count = sink, 0
        self.goes_on = threading.Event()
        """The compute thread waits for it."""
        self.goes_on.set()
        self.waits = threading.Event()
        """It does, or has."""
        self._chosen: Container[int] = ()

    def run_out(self, chosen: Container[int]) -> None:
        """There is no memory at these, which count from 0: each step that begins, and each layer that is handed over."""
        self._count, self._chosen = 0, chosen

    def step_started(self, plan: StepPlan) -> LayerDone | None:
        done = self._sink.step_started(plan)
        self._allocate()
        if done is None:
            return None

        def layer_done(rank: int, layer: int, after: DeviceWork | None = None) -> None:
            done(rank, layer, after)
            self._allocate()

        return layer_done

    def _allocate(self) -> None:
        if not self.goes_on.is_set():
            self.waits.set()
            self.goes_on.wait()
        number, self._count = self._count, self._count + 1
        if number in self._chosen:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class World:
    """Instances, a frontend, and a scheduler that places everything as the test says."""

    def __init__(
        self, folder: Path, num_prefill: int = 1, num_decode: int = 1, num_both: int = 0, *,
        of_role: Mapping[str, Mapping[str, Any]] | None = None, observe: Observe = nobody, **overrides: Any,
    ) -> None:  # fmt: skip
        """`of_role`: what instances of a role have in place of the others' configuration."""
        values = {
            "model.path": str(folder),
            "engine.block_size": 4,
            "engine.num_blocks": 200,
            "engine.max_batch_tokens": 24,
        }
        self.config: ClusterConfig = load(None, {}, values | overrides)
        self.config_of: dict[str, ClusterConfig] = {
            role: load(None, {}, values | overrides | dict(own)) for role, own in (of_role or {}).items()
        }
        self.network, self.fabric = LoopbackNetwork(), LoopbackFabric()
        self.scheduler = self.network.join("scheduler")
        self.scheduler.listen(self._on_message, lambda _: None)
        self.messages: list[Message] = []
        self.groups: dict[str, Breakable] = {}
        self.sinks: dict[str, Scarce] = {}
        self.prefills = [self._instance(folder, "prefill") for _ in range(num_prefill)]
        self.decodes = [self._instance(folder, "decode") for _ in range(num_decode)]
        both = [self._instance(folder, "both") for _ in range(num_both)]
        self.decodes += both
        self.prefills += reversed(both)  # so that nobody's prompt is computed where it is decoded
        self.frontend = Frontend(
            self.network.join("frontend"),
            WallClock(),
            self.config.schedule,
            4,
            resolve_schedulers=self._resolve,
            request_timeout_s=60,
            observe=observe,
        )
        self.running = asyncio.create_task(self.frontend.run())
        self.count = 0
        self.num_tokens = 0

    async def _resolve(self) -> list[str]:
        return [self.scheduler.address]

    def _instance(self, folder: Path, role: Any) -> Instance:
        mail, config = self.network.join(role), self.config_of.get(role, self.config)
        parts = local_parts(config, folder, role, mail, self.fabric)
        if config.engine.speculate != "none":
            parts = with_even_steps(parts)

        def make_group(sink: LayerSink | None) -> WorkerGroup:
            assert sink is not None
            self.sinks[mail.address] = scarce = Scarce(sink)
            self.groups[mail.address] = group = Breakable(parts.make_group(scarce))
            return group

        breakable = replace(parts, make_group=make_group)
        instance = Instance(config, role, mail, WallClock(), self._resolve, breakable)
        instance.run()
        return instance

    def _on_message(self, sender: str, message: Message) -> None:
        self.messages.append(message)
        match message:
            case PlaceRequest(request_id=request_id, attempt=attempt):
                decodes = [d for d in self.decodes if d.address not in message.exclude and not d.failure]
                prefills = self.prefills
                if message.ends_with_prompt and prefills:
                    decodes, prefills = prefills, []
                source = message.source or (prefills[self.count % len(prefills)].address if prefills else "")
                route = Route(decodes[self.count % len(decodes)].address, source)
                self.count += 1
                self.scheduler.send(sender, PlaceReply(request_id, attempt, route))
            case NeedPrefill(request_id=request_id, attempt=attempt, epoch=epoch):
                others = [p.address for p in self.prefills if p.address not in (message.lost, sender)]
                self.scheduler.send(
                    sender, PrefillAssigned(request_id, attempt, epoch, others[0] if others else "")
                )
            case _:
                pass

    def request(
        self, prompt: tuple[int, ...], max_tokens: int, *, slo: Slo = STANDARD, **sampling: Any
    ) -> Request:
        sampled: dict[str, Any] = {"temperature": 0.0, **sampling}
        params = SamplingParams(
            **sampled,
            max_tokens=max_tokens,
            stop_token_ids=(1,),
            masked_until_min=(1,),
        )
        return Request(
            id=self.frontend.new_request_id(),
            prompt=prompt,
            sampling=params,
            reply_to=self.frontend.address,
            slo=slo,
        )

    async def run(self, prompt: tuple[int, ...], max_tokens: int, **sampling: Any) -> list[int]:
        tokens: list[int] = []
        async for token in self.frontend.generate(self.request(prompt, max_tokens, **sampling)):
            tokens.append(token.token)
            self.num_tokens += 1
        return tokens

    async def kill(self, instance: Instance) -> None:
        pool = self.prefills if instance in self.prefills else self.decodes
        pool.remove(instance)
        await instance.close()

    async def idle(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while any(i.num_jobs or i.num_used_blocks for i in self.prefills + self.decodes):
                await asyncio.sleep(0.005)
        for instance in self.prefills + self.decodes:
            instance.check_integrity()

    async def reports(self) -> list[LoadReport]:
        """Return all reports of the instances, with one of each that was made after the call."""
        alive = {instance.address for instance in self.prefills + self.decodes}
        num_before = len(self.messages)
        async with asyncio.timeout(PATIENCE_S):
            while alive - {m.address for m in self.messages[num_before:] if isinstance(m, LoadReport)}:
                await asyncio.sleep(0.005)
        return [message for message in self.messages if isinstance(message, LoadReport)]

    async def report(self, instance: Instance) -> LoadReport:
        """Return one of this instance that was made after the call."""
        return [one for one in await self.reports() if one.address == instance.address][-1]

    async def close(self) -> None:
        self.running.cancel()
        await self.frontend.close()
        for instance in {*self.prefills, *self.decodes}:
            await instance.close()


@contextlib.asynccontextmanager
async def world(folder: Path, *args: int, **overrides: Any):
    made = World(folder, *args, **overrides)
    await asyncio.sleep(0.01)
    try:
        yield made
    finally:
        await made.close()
