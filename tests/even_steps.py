"""Steps that all say they took the same time, so that no plan depends on how busy the machine is.

How many draft tokens are worth while is decided by how long steps take with draft tokens and without. A busy machine delays some
of them, and now and then it looks as if no draft token had ever paid."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from cluster.instance.instance_parts import InstanceParts, Role
from cluster.instance.real_parts import local_parts
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig
from core.plan import StepPlan, StepResult
from core.ports import LayerSink, WorkerGroup
from kvtransfer.transport.loopback_transport import LoopbackFabric
from net.loopback_mail import LoopbackMail, LoopbackNetwork

STEP_S = 1e-6
"""A step is really longer. So the time from one commit to the next, which an engine measures itself, always counts as the same few
of these (`engine.planning.speculation.realised_gain`)."""
PROPOSING_S = STEP_S / 1000


class EvenSteps:
    """A WorkerGroup to which more tokens and draft tokens are nothing."""

    def __init__(self, group: WorkerGroup) -> None:
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
        return replace(
            result,
            duration_s=STEP_S,
            proposing_s=PROPOSING_S if result.proposing_s else 0.0,
            reading_s=PROPOSING_S if result.reading_s else 0.0,
        )


def with_even_steps(parts: InstanceParts) -> InstanceParts:
    def make_group(sink: LayerSink | None) -> WorkerGroup:
        return EvenSteps(parts.make_group(sink))

    return replace(parts, make_group=make_group)


@asynccontextmanager
async def cluster_of_even_steps(config: ClusterConfig) -> AsyncIterator[LocalCluster]:
    """As `LocalCluster.running`."""
    network, fabric = LoopbackNetwork(), LoopbackFabric()

    def parts(role: Role, mail: LoopbackMail) -> InstanceParts:
        return with_even_steps(local_parts(config, Path(config.model.path), role, mail, fabric))

    async with LocalCluster.assembled(config, network.join, parts) as cluster:
        yield cluster
