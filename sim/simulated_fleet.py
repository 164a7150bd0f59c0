"""The instances of the full simulation: the production ones over modelled ranks and links. They may come and go while it runs."""

from math import inf

from cluster.instance.instance import Instance
from cluster.instance.instance_parts import InstanceParts, Role
from core.config.cluster_config import ClusterConfig
from core.cost.steps import with_experts
from core.kv import KVLayout, KVShard
from core.ports import Clock, LayerSink, Mail, Resolve
from kvtransfer.inbox import Inbox
from kvtransfer.transport.base import Receiver, Sender
from kvtransfer.transport.loopback_transport import LoopbackFabric, LoopbackReceiver
from net.loopback_mail import LoopbackNetwork
from sim.fleet_changes import InstanceLife
from sim.link import ModelledLink, ModelledSender
from sim.modelled import ModelledGroup
from sim.simulated_run import HOST, VOCAB_SIZE, SimConfig


class SimulatedFleet:
    """sim.fleet_changes.ChangingFleet. `start_at` is when the first request may come."""

    def __init__(
        self,
        config: SimConfig,
        settings: ClusterConfig,
        network: LoopbackNetwork,
        clock: Clock,
        resolve: Resolve,
    ) -> None:
        self._config, self._settings, self._network = config, settings, network
        self._clock, self._resolve = clock, resolve
        self._fabric = LoopbackFabric()
        self._instances: list[tuple[InstanceLife, Instance]] = []
        """The instances that have not ended."""
        self._leaving: set[int] = set()
        self.lives: list[InstanceLife] = []
        """All that there were, in order of their starts."""
        self.start_at = 0.0
        layout = KVLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=settings.engine.block_size,
            dtype="bfloat16",
        )
        self._shard = KVShard.whole(layout)

    def start_instance(self, life: InstanceLife) -> None:
        mail = self._network.join(life.role)
        instance = Instance(self._settings, life.role, mail, self._clock, self._resolve, self._parts(mail))
        life.serving_at = max(0.0, self._clock.now() - self.start_at) if self.start_at else 0.0
        self.lives.append(life)
        self._instances.append((life, instance))
        instance.run()

    def living(self, role: Role) -> list[InstanceLife]:
        return [life for life, _ in self._instances if life.role == role and id(life) not in self._leaving]

    def nth(self, role: Role, number: int) -> InstanceLife | None:
        ever = [life for life in self.lives if life.role == role]
        found = ever[number - 1] if number <= len(ever) else None
        return found if found is not None and found.ended_at == inf else None

    async def lose(self, life: InstanceLife) -> None:
        instance = self._take(life)
        if instance is not None:
            await instance.close()

    async def drain(self, life: InstanceLife) -> None:
        self._leaving.add(id(life))
        instance = next(instance for own, instance in self._instances if own is life)
        await instance.drain(self._settings.serve.drain_timeout_s)
        await self.lose(life)

    def check_integrity(self) -> None:
        """Raise Bug when an instance's accounting is off."""
        for _, instance in self._instances:
            instance.check_integrity()

    async def close(self) -> None:
        for _, instance in self._instances:
            await instance.close()

    def _take(self, life: InstanceLife) -> Instance | None:
        """Return the instance that ends now; None where it has ended before."""
        found = next((instance for own, instance in self._instances if own is life), None)
        self._instances = [(own, instance) for own, instance in self._instances if own is not life]
        if found is not None:
            life.ended_at = self._clock.now() - self.start_at
        return found

    def _parts(self, mail: Mail) -> InstanceParts:
        config = self._config

        def receivers(inbox: Inbox) -> list[Receiver]:
            return [LoopbackReceiver(self._fabric, mail.address, None, inbox.may_write, inbox.arrived)]

        def senders() -> list[Sender]:
            pairs = {to: cost for (by, to), cost in config.pairs.items() if by == mail.address}
            return [ModelledSender(self._fabric, ModelledLink(self._clock, config.link, pairs))]

        def group(sink: LayerSink | None) -> ModelledGroup:
            return ModelledGroup(self._clock, config.step, config.num_layers, VOCAB_SIZE, sink)

        return InstanceParts(
            shard=self._shard,
            num_blocks=config.num_blocks,
            max_context_tokens=1 << 20,
            make_receivers=receivers,
            make_senders=senders,
            make_group=group,
            host=HOST,
            steps=with_experts(config.steps, config.step.unread_decay),
        )
