"""The process around the pure GlobalScheduler: messages in, decisions out, and a tick while anybody waits."""

import asyncio

from cluster.routing import Event, GlobalScheduler, Heard, PeerLost, Tick
from core.messages import AskStatus, Message
from core.ports import Clock, Mail

_TICK_S = 0.25


class SchedulerNode:
    """`run` until cancelled."""

    def __init__(self, mail: Mail, clock: Clock, scheduler: GlobalScheduler) -> None:
        self._mail, self._clock, self._scheduler = mail, clock, scheduler
        self._waiting = asyncio.Event()

    async def run(self) -> None:
        self._mail.listen(self._on_message, lambda peer: self._on(PeerLost(peer)))
        while True:
            await self._waiting.wait()
            await self._clock.sleep(_TICK_S)
            self._on(Tick())

    def _on_message(self, sender: str, message: Message) -> None:
        if isinstance(message, AskStatus):
            self._mail.send(sender, self._scheduler.status(message.nonce))
        else:
            self._on(Heard(sender, message))

    def _on(self, event: Event) -> None:
        for send in self._scheduler.on(event, self._clock.now()):
            self._mail.send(send.to, send.message)
        if self._scheduler.num_queued:
            self._waiting.set()
        else:
            self._waiting.clear()
