"""One process of a chaos cluster: the production scheduler, frontend, ingress or instance, over the witness device or a real model.

Commands come as JSON lines on standard input; `obeyed` and other events go to standard output. It ends with its input and parent.

    {"do": "trap", "states": ["decode.GRANTED"]}       stop this very process (SIGSTOP) when a hand-over enters one of them, once each
    {"do": "fate", "message": "Commit", "kind": "drop"}  treat the next outgoing message of that type badly, below the numbering
    {"do": "corrupt", "frames": 2}                      so many writes of KV carry a wrong checksum
    {"do": "full disk"}                                 nothing more can be written to the disk tier
    {"do": "step clock", "offset_s": 3600}              the wall clock is so far off from now on; 0: it is right again
    {"do": "slow", "write_s": 0.02}                     every write of KV takes so much longer
    {"do": "hang", "how": "step"}                       the next step does not end; "interpreter": and keeps that; "": no next one
    {"do": "generate", "id": .., "prompt": .., "max_tokens": .., "grammar": .., "seed": ..}  {"do": "cancel", "id": ..}
    {"do": "drain"}                                     leave the cluster; says when nothing runs here any more
    {"do": "status"}                                    what this process still holds
"""

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cluster.ingress.delivery.frontend import Frontend
from cluster.ingress.telemetry.timeline import Attempt, Timeline
from cluster.instance.device_access import device_access
from cluster.instance.instance import Instance
from cluster.instance.instance_parts import InstanceParts, Role
from cluster.instance.pool_access import PoolAccess, remote_access
from cluster.instance.process_guard import ProcessGuard
from cluster.instance.real_parts import InstancePlace, remote_parts
from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.placement.slo_policy import SloPolicy
from cluster.scheduler.scheduler_node import SchedulerNode
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig, load
from core.cost.steps import StepModel, StepModels
from core.kv import RankPool
from core.plan import StepPlan, StepResult
from core.ports import LayerSink
from core.types import Grammar, Request, SamplingParams
from device.simulated import SimulatedDevice
from engine.execution.inline_group import InlineGroup
from engine.ranks.child_ranks import children
from engine.tiers import disk_tier
from engine.tiers.build_tiers import build_tiers
from kvtransfer.handoff import DecodeHandoff, PushHandoff
from kvtransfer.transport.base import Sender
from kvtransfer.transport.shm import host_id
from net.mail import TcpMail
from net.tls import tls_of
from parallel.mesh import Mesh
from tests.chaos.apart_policy import ApartPolicy
from tests.chaos.device_witness import DeviceWitnessRank, simulated_memory
from tests.chaos.faults import FAULTS, SlowSender, no_space, step_clock, tell, watch, wrong_checksums
from tests.chaos.witness import SHARD, WitnessRank
from tests.net.faulty import FaultyChannel

KEY = b"chaos"
END = 0
"""The token that ends what a grammar holds."""
LAYER_S = 0.003
REQUEST_TIMEOUT_S = 60.0
"""After so long a request fails, whatever holds it up."""
STEPS = StepModels(*(StepModel(fixed_s=3 * LAYER_S, num_steps=1) for _ in range(2)))
"""As from a profile."""
_DIE_WITH_PARENT = 1


def sampling_of(command: dict[str, Any]) -> SamplingParams:
    max_tokens, seed, grammar = command["max_tokens"], command["seed"], command["grammar"]
    if not grammar:
        return SamplingParams(max_tokens=max_tokens, seed=seed, temperature=0.0)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=(END,),
        masked_until_min=(END,),
        grammar=Grammar(text=grammar),
    )


class Node:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.has_model = "model.path" in spec["overrides"]
        self.name, self.role = spec["name"], spec["role"]
        self.folder, self.apart, self.num_spares = Path(spec["folder"]), spec["apart"], spec["num_spares"]
        self.config: ClusterConfig = load(None, {}, spec["overrides"])
        self.host, self.on_device = spec["host"], spec["on_device"]
        """Whether KV pools lie on simulated devices."""
        self.device: SimulatedDevice | None = None
        self.mail = TcpMail(
            KEY,
            spec["host"],
            port=spec["port"],
            config=self.config.mail,
            wrap=lambda channel: FaultyChannel(channel, FAULTS.fate, 0.3),  # type: ignore[arg-type,return-value]
            tls=tls_of(self.config.security, KEY),
        )
        self.http = int(spec["overrides"].get("serve.port", 0))
        """The port of an ingress."""
        self.num_placed = 0
        """Requests for which this scheduler has found a place."""
        self.num_computed = 0
        """Tokens whose KV was computed here."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.attempts: dict[str, list[Attempt]] = {}
        """By request, until its end is told."""

    async def resolve(self) -> list[str]:
        """Return the schedulers. Lost ones are listed until others replace them."""
        return [path.read_text() for path in self.folder.glob("scheduler*.at")]

    def decided(self, line: str) -> None:
        self.num_placed += line.startswith("place ")

    def start(self) -> None:
        match self.role:
            case "scheduler":
                policy = ApartPolicy() if self.apart else SloPolicy(0)
                self.scheduler = GlobalScheduler(self.config.schedule, policy, self.decided)
                count = self.config.serve.schedulers
                node = SchedulerNode(
                    self.mail,
                    WallClock(),
                    self.scheduler,
                    self.resolve if count + self.num_spares > 1 else None,
                    count,
                    num_spares=self.num_spares,
                )
                self.keep("run", node.run())
                new = self.folder / f"{self.name}.{os.getpid()}"
                new.write_text(self.mail.address)
                new.rename(self.folder / f"{self.name}.at")
            case "frontend":
                self.frontend = Frontend(
                    self.mail,
                    WallClock(),
                    self.config.schedule,
                    SHARD.layout.block_size,
                    resolve_schedulers=self.resolve,
                    request_timeout_s=REQUEST_TIMEOUT_S,
                    observe=self.observe,
                    num_schedulers=self.config.serve.schedulers,
                    num_spare_schedulers=self.num_spares,
                )
                self.keep("run", self.frontend.run())
            case "ingress":
                from tests.chaos.ingress_node import IngressNode

                ingress = IngressNode(self.config, self.mail, self.resolve, self.http)
                self.frontend, self.http = ingress.frontend, ingress.port
                self.keep("run", ingress.run())
            case _:
                self.instance = Instance(
                    self.config,
                    self.role,
                    self.mail,
                    WallClock(),
                    self.resolve,
                    self.parts(self.role),
                    num_spare_schedulers=self.num_spares,
                )
                self.instance.run()
                ProcessGuard(self.instance, self.config.mail)

    def observe(self, timeline: Timeline) -> None:
        self.attempts[timeline.request.id] = timeline.attempts

    def parts(self, role: Role) -> InstanceParts:
        if self.has_model:
            made = remote_parts(self.config, Path(self.config.model.path), role, self.mail, KEY, self.ranks)
        else:
            made = self.witness_parts(role)

        def senders() -> list[Sender]:
            return [SlowSender(sender) for sender in made.make_senders()]  # type: ignore[misc]

        return replace(made, make_senders=senders)

    def ranks(self, mesh: Mesh) -> InstancePlace:
        return InstancePlace(children(self.config.engine, mesh))

    def witness_parts(self, role: Role) -> InstanceParts:
        num_blocks = self.config.engine.num_blocks
        access = self.device_access(num_blocks) if self.on_device else self.host_access(role, num_blocks)

        def group(sink: LayerSink | None) -> InlineGroup:
            kind = DeviceWitnessRank if self.on_device else WitnessRank
            rank = kind(access.buffer, num_blocks, sink, LAYER_S)  # type: ignore[arg-type]

            def step(plan: StepPlan) -> StepResult:
                FAULTS.step_begins()
                self.num_computed += plan.num_tokens
                return rank.step(plan)

            return InlineGroup(step)

        tiers = build_tiers(
            self.config.engine, access.buffer, [RankPool(shard=SHARD, num_blocks=num_blocks)], "witness"
        )
        return InstanceParts(
            shard=SHARD,
            num_blocks=num_blocks,
            max_context_tokens=400,
            make_receivers=access.make_receivers,
            make_senders=access.make_senders,
            make_group=group,
            host=f"{host_id()} {self.host}",
            source=access.source,
            staging=None,
            tiers=tiers,
            model="witness",
            steps=STEPS,
        )

    def host_access(self, role: Role, num_blocks: int) -> PoolAccess:
        return remote_access(
            self.config.transfer,
            self.mail.me,
            self.host,
            receives=role != "prefill",
            key=KEY,
            num_bytes=SHARD.pool_bytes(num_blocks),
            security=self.config.security,
        )

    def device_access(self, num_blocks: int) -> PoolAccess:
        memory, self.device = simulated_memory(num_blocks, seed=os.getpid())
        me, num_bytes = self.mail.me, SHARD.pool_bytes(num_blocks)
        return device_access(
            self.config.transfer,
            me,
            self.host,
            key=KEY,
            memory=memory,
            num_bytes=num_bytes,
            media={},
            security=self.config.security,
        )

    async def generate(self, name: str, prompt: list[int], sampling: SamplingParams) -> None:
        request = Request(
            id=self.frontend.new_request_id(),
            prompt=tuple(prompt),
            sampling=sampling,
            reply_to=self.frontend.address,
        )
        finish = None
        try:
            async for token in self.frontend.generate(request):
                tell(event="token", id=name, token=token.token, index=token.index)
                finish = token.finish
            attempts = self.attempts.pop(request.id)
            lost = [one.lost for one in attempts if one.lost]
            routes = [[one.route.prefill, one.route.decode] for one in attempts if one.route]
            tell(event="end", id=name, error="", finish=finish, lost=lost, routes=routes)
        except Exception as error:
            tell(event="end", id=name, error=f"{type(error).__name__}: {error}")

    async def drain(self) -> None:
        await self.instance.drain(20.0)
        tell(event="drained")

    def obey(self, command: dict[str, Any]) -> None:
        match command:
            case {"do": "trap", "states": states}:
                FAULTS.traps = set(states)
            case {"do": "fate", "message": message, "kind": kind}:
                FAULTS.fates[message] = kind
            case {"do": "corrupt", "frames": frames}:
                FAULTS.corrupt = frames
            case {"do": "full disk"}:
                disk_tier.os.pwritev = no_space  # type: ignore[assignment]
            case {"do": "step clock", "offset_s": offset_s}:
                step_clock(offset_s)
            case {"do": "slow", "write_s": write_s}:
                FAULTS.write_s = write_s
            case {"do": "hang", "how": how}:
                FAULTS.hang = how
            case {"do": "generate", "id": name, "prompt": prompt}:
                self.keep(name, self.generate(name, prompt, sampling_of(command)))
            case {"do": "cancel", "id": name}:
                self.tasks[name].cancel()
            case {"do": "drain"}:
                self.keep("drain", self.drain())
            case {"do": "status"}:
                tell(event="status", **self.status())
            case _:
                raise ValueError(f"unknown command {command}")

    def status(self) -> dict[str, Any]:
        """`held`: everything that should be nothing once all requests are over."""
        match self.role:
            case "scheduler":
                status = self.scheduler.status()
                held = self.scheduler.num_queued + self.scheduler.num_placed
                routes = [[p.frontend, p.route.prefill, p.route.decode] for p in self.scheduler.placements]
                return {
                    "held": held,
                    "instances": [i.address for i in status.instances],
                    "computed": sum(i.work.computed_tokens for i in status.instances),
                    "restored": {i.address: i.tiers.host_hits + i.tiers.disk_hits for i in status.instances},
                    "routes": routes,
                    "peers": self.scheduler.peer_schedulers,
                    "placed": self.num_placed,
                }
            case "frontend" | "ingress":
                return {"held": self.frontend.num_running}
            case _:
                self.instance.check_integrity()
                instance = self.instance
                kept: list[Any] = [instance.num_jobs, instance.num_used_blocks, instance.num_grants]
                kept += self.device.violations if self.device else []
                held = kept if any(kept) else 0
                failure = str(instance.failure or "")
                return {
                    "held": held,
                    "computed": self.num_computed,
                    "hung": FAULTS.is_hung,
                    "failed": failure,
                }

    def keep(self, name: str, work: Any) -> None:
        self.tasks[name] = asyncio.create_task(work)

    async def run(self) -> None:
        self.start()
        tell(event="ready", address=self.mail.address, http=self.http)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        while line := await reader.readline():
            command = json.loads(line)
            self.obey(command)
            tell(event="obeyed", number=command.get("number", 0))
        if self.role in ("prefill", "decode"):
            await self.instance.close()
        os._exit(0)


def main(spec: str) -> None:
    """Run the node that `spec` (JSON) describes, in this process."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    torch.set_num_threads(1)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {os.getpid()} %(name)s %(message)s"
    )
    watch("decode", DecodeHandoff)
    watch("prefill", PushHandoff)
    wrong_checksums()
    asyncio.run(Node(json.loads(spec)).run())
