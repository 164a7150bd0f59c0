"""The global scheduler as a process part: mail in, mail out, and a tick while requests wait. All decisions are in routing."""

import asyncio
import logging
from dataclasses import replace

from cluster.events import Arrived, Event, PeerLost, PrefillNeeded, Tick
from cluster.routing import GlobalScheduler
from core.messages import AskStatus, Finished, Leaving, Message, NeedPrefill, Place
from core.ports import Clock, Mail
from core.reports import LoadReport, PoolStatus, Register, Status

log = logging.getLogger(__name__)

_TICK_S = 0.1


class SchedulerNode:
    """Serves frontends and workers on `mail`. `run` must be running; `close` ends its mail."""

    def __init__(self, mail: Mail, clock: Clock, scheduler: GlobalScheduler) -> None:
        self._mail, self._clock, self._scheduler = mail, clock, scheduler
        self._waiting = asyncio.Event()
        self._defects: dict[str, str] = {}
        self._pools: tuple[PoolStatus, ...] = ()

    @property
    def address(self) -> str:
        return self._mail.address

    async def run(self) -> None:
        """For as long as the scheduler lives; ends by cancellation."""
        self._mail.listen(self._on_message, self._on_lost)
        while True:
            await self._waiting.wait()
            await self._clock.sleep(_TICK_S)
            self._feed(Tick())

    async def close(self) -> None:
        await self._mail.close()

    def has_capacity(self) -> bool:
        """Would a request be answered now?"""
        return not self._scheduler.why_not()

    def snapshot(self) -> Status:
        return self._status()

    def show_pools(self, pools: tuple[PoolStatus, ...]) -> None:
        """What the autoscaler says is part of the status from now on."""
        self._pools = pools

    def _on_message(self, sender: str, message: Message) -> None:
        match message:
            case Place():
                self._feed(Arrived(sender, message))
            case NeedPrefill():
                self._feed(PrefillNeeded(sender, message))
            case LoadReport():
                self._note_defect(message)
                self._feed(message)
            case Finished() | Register() | Leaving():
                self._feed(message)
            case AskStatus(nonce):
                self._mail.send(sender, self._status(nonce))
            case _:
                log.error("%s is not for the scheduler (from %s)", type(message).__name__, sender)

    def _status(self, nonce: int = 0) -> Status:
        return replace(self._scheduler.status(nonce), pools=self._pools)

    def _on_lost(self, peer: str) -> None:
        self._defects.pop(peer, None)
        self._feed(PeerLost(peer))

    def _feed(self, event: Event) -> None:
        for action in self._scheduler.on(event, self._clock.now()):
            self._mail.send(action.to, action.message)
        if self._scheduler.num_queued:
            self._waiting.set()
        else:
            self._waiting.clear()

    def _note_defect(self, report: LoadReport) -> None:
        if report.defect and self._defects.get(report.address) != report.defect:
            log.error("instance %s found its block accounting broken: %s", report.address, report.defect)
        self._defects[report.address] = report.defect
