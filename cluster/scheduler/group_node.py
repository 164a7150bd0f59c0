"""The owner of a group's memory as a part of a process: what schedulers tell comes by mail, and orders go by mail.

It keeps nothing. Where it is gone, models stay as they are, and requests for one that sleeps wait until another owner is there,
which learns all from what the schedulers tell."""

from cluster.scheduler.residency.group_owner import GroupOwner
from core.messages import Message
from core.ports import Clock, Mail
from core.sleep_messages import ModelDemand


class GroupNode:
    """Serves the schedulers of a group's models on `mail`, until `close`."""

    def __init__(self, mail: Mail, clock: Clock, owner: GroupOwner) -> None:
        self._mail, self._clock, self._owner = mail, clock, owner
        self._schedulers: dict[str, str] = {}
        """By model, where its scheduler listens."""

    @property
    def address(self) -> str:
        return self._mail.address

    def run(self) -> None:
        """Begin to decide."""
        self._mail.listen(self._hear, self._on_lost)

    async def close(self) -> None:
        await self._mail.close()

    def _hear(self, sender: str, message: Message) -> None:
        if not isinstance(message, ModelDemand):
            return
        self._schedulers[message.model] = sender
        for model, order in self._owner.on(message, self._clock.now()):
            self._mail.send(self._schedulers[model], order)

    def _on_lost(self, peer: str) -> None:
        """What a lost scheduler has told stays: its instances have memory as before, until its successor says more."""
