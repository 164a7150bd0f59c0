"""One model's scheduler in the group of models with which it shares memory."""

import asyncio

from cluster.scheduler.scheduler_node import SchedulerNode
from core.messages import Message
from core.ports import Clock, Mail, Resolve
from core.sleep_messages import GroupOrder
from net.schedulers import Schedulers

_BETWEEN_S = 0.05
"""The least time between two reports."""


class GroupMember:
    """Tells the group's owner what the model is asked for, and passes its orders on to the scheduler, while `run` runs."""

    def __init__(
        self,
        mail: Mail,
        clock: Clock,
        node: SchedulerNode,
        resolve_owner: Resolve,
        model: str,
        num_instances: int,
    ) -> None:
        self._mail, self._clock, self._node = mail, clock, node
        self._model, self._num_instances = model, num_instances
        self._owners = Schedulers(resolve_owner, 1, clock, lambda _: node.stirred.set())

    async def run(self) -> None:
        """Run for as long as the scheduler lives, until cancelled."""
        self._mail.listen(self._hear, self._on_lost)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._owners.run())
            tasks.create_task(self._tell())

    async def close(self) -> None:
        await self._mail.close()

    async def _tell(self) -> None:
        """Report after each event, and not too often."""
        while True:
            await self._node.stirred.wait()
            self._node.stirred.clear()
            if owner := self._owners.first:
                self._mail.send(owner, self._node.demand(self._model, self._num_instances))
            await self._clock.sleep(_BETWEEN_S)

    def _on_lost(self, peer: str) -> None:
        self._owners.lose(peer)

    def _hear(self, sender: str, message: Message) -> None:
        if isinstance(message, GroupOrder) and sender == self._owners.first:
            self._node.obey(message)
