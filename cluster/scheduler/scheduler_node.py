"""The global scheduler as a part of a process: mail in, mail out, and a tick while requests wait. `global_scheduler` decides."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from cluster.scheduler.adapter_registry import AdapterRegistry, Word
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.kept_adapters import Answer, KeptAdapters
from cluster.scheduler.limit_keeper import SETTLE_S, LimitKeeper
from cluster.scheduler.limit_keeper import Word as LimitWord
from cluster.scheduler.scheduler_events import (
    Event,
    OperatorAsked,
    PeerLost,
    PrefillNeeded,
    RequestArrived,
    RequestLeft,
    Tick,
)
from core.adapter_messages import (
    AdapterChanged,
    AdapterList,
    AdaptersHeld,
    AdaptersUsed,
    LoadAdapter,
    UnloadAdapter,
)
from core.messages import (
    AskShares,
    AskStatus,
    Finished,
    Leaving,
    LimitBookCopy,
    Message,
    NeedPrefill,
    PeerBacklog,
    PeerRequest,
    PeersChanged,
    PlacedByPeer,
    PlaceRequest,
    ReleasedByPeer,
    SharesTaken,
)
from core.ports import Clock, Mail, Resolve
from core.reports import LoadReport, PoolStatus, Register, Status
from core.sleep_messages import AskSleep, AskWake, Asleep, GroupOrder, KeepAwake, ModelDemand
from net.schedulers import Schedulers

log = logging.getLogger(__name__)

_TICK_S = 0.1
_NOTHING_WAITS = PeerBacklog(0, 0)


class SchedulerNode:
    """Serves frontends and workers on `mail`. `run` must be running; `close` ends its mail.

    With `resolve` it looks for the others and tells them what it tells its frontends: there are `num_schedulers`, and
    `num_spares` more. Without `kept_adapters` the list of the adapters that are loaded ends with the cluster."""

    def __init__(
        self,
        mail: Mail,
        clock: Clock,
        scheduler: GlobalScheduler,
        resolve: Resolve | None = None,
        num_schedulers: int = 1,
        kept_adapters: KeptAdapters | None = None,
        *,
        num_spares: int = 0,
    ) -> None:
        self._mail, self._clock, self._scheduler = mail, clock, scheduler
        self._num_spares, num_others = num_spares, num_schedulers + num_spares - 1
        self._others = (
            None
            if resolve is None
            else Schedulers(partial(_but, mail.address, resolve), num_others, clock, self._on_found)
        )
        self._backlogs: dict[str, PeerBacklog] = {}
        """The other schedulers' backlogs."""
        self._told = _NOTHING_WAITS
        self._waiting = asyncio.Event()
        self.stirred = asyncio.Event()
        """Set after each event. Who waits for it clears it."""
        self._adapters, self._kept_adapters = AdapterRegistry(mail.address), kept_adapters
        if kept_adapters is not None:
            self._adapters.restore(kept_adapters.listed, clock.now())
        self._limits = LimitKeeper(is_alone=resolve is None)
        self._joining: dict[str, list[Register | LoadReport | Leaving]] = {}
        """What instances have said that still lack an adapter: until they have it, they are not there for requests."""
        self._defects: dict[str, str] = {}
        self._pools: tuple[PoolStatus, ...] = ()
        self._trouble = ""

    @property
    def address(self) -> str:
        return self._mail.address

    async def run(self) -> None:
        """Run for as long as the scheduler lives, until cancelled."""
        self._note_waiting()
        self._mail.listen(self._hear, self._on_lost)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            if self._kept_adapters is not None:
                tasks.create_task(self._kept_adapters.run(self._mail.send))
            if self._others is not None:
                tasks.create_task(self._others.run())
                tasks.create_task(self._settle_limits())

    async def close(self) -> None:
        await self._mail.close()

    def demand(self, model: str, num_instances: int) -> ModelDemand:
        """Return what the model asks of its group, as `GlobalScheduler.demand` does."""
        return self._scheduler.demand(model, num_instances, self._clock.now())

    def obey(self, order: GroupOrder) -> None:
        """Do what the group's owner says."""
        self._feed(order)

    @property
    def members(self) -> tuple[Member, ...]:
        return self._scheduler.members

    @property
    def leads(self) -> bool:
        return self._scheduler.leads

    @property
    def queued_tokens(self) -> int:
        """Tokens of all prompts that wait for a place, here and at the other schedulers."""
        return self._scheduler.queued_tokens + sum(b.queued_tokens for b in self._backlogs.values())

    def show_pools(self, pools: tuple[PoolStatus, ...]) -> None:
        """Show the autoscaler's state of the pools in the status from now on."""
        self._pools = pools

    def show_trouble(self, why: str) -> None:
        """Say in the status why instances are missing, where nothing can be placed for it."""
        self._trouble = why

    def _hear(self, sender: str, message: Message) -> None:
        if isinstance(message, AskShares | SharesTaken | LimitBookCopy):
            peers = self._scheduler.peer_schedulers
            self._send(self._limits.on(sender, message, peers, self._clock.now()))
        else:
            self._on_message(sender, message)

    def _on_message(self, sender: str, message: Message) -> None:
        match message:
            case PlaceRequest() | NeedPrefill() | Finished() | AskSleep() | AskWake():
                self._feed(_asked_by(sender, message))
            case AdapterList() | AdaptersHeld() | AdaptersUsed() | LoadAdapter() | UnloadAdapter():
                peers = self._scheduler.peer_schedulers
                self._tell(self._adapters.on(sender, message, peers, self._clock.now()))
            case Register() if not self._adapters.is_current(sender):
                self._joining[sender] = [message]
            case LoadReport() | Leaving() if sender in self._joining:
                self._joining[sender].append(message)
            case LoadReport():
                self._note_defect(message)
                self._feed(message)
            case Asleep():
                self._on_asleep(message)
            case Register() | Leaving() | KeepAwake() | PlacedByPeer() | ReleasedByPeer() | PeerRequest():
                self._feed(message)
            case PeerBacklog():
                self._backlogs[sender] = message
            case AskStatus(nonce):
                self._mail.send(sender, self._status(nonce))
            case _:
                log.error("%s is not for the scheduler (from %s)", type(message).__name__, sender)

    def _on_asleep(self, said: Asleep) -> None:
        """An instance that sleeps has none of the adapters that are loaded later: it is told of all when it registers again."""
        self._feed(said)
        if said.state == "asleep":
            self._joining.pop(said.address, None)
            others = self._scheduler.peer_schedulers
            self._tell(self._adapters.lost(said.address, others, self._clock.now()))

    def _status(self, nonce: int = 0) -> Status:
        status = self._scheduler.status(nonce)
        num_queued = status.num_queued + sum(backlog.num_queued for backlog in self._backlogs.values())
        why_not = f"{status.why_not}: {self._trouble}" if status.why_not and self._trouble else status.why_not
        return replace(status, num_queued=num_queued, pools=self._pools, why_not=why_not)

    def _tell(self, words: Sequence[Word]) -> None:
        """Tell what the list of adapters asks for, and take in the instances that have all of it now."""
        answers: list[Answer] = []
        for to, message in words:
            if isinstance(message, AdapterChanged):
                answers.append((to, message))
            else:
                self._mail.send(to, message)
        self._answer(answers)
        for address in [one for one in self._joining if self._adapters.is_current(one)]:
            for said in self._joining.pop(address):
                self._on_message(address, said)
        self._note_waiting()

    def _answer(self, answers: list[Answer]) -> None:
        """Answer who has asked for a change of the list, which the store has before."""
        if self._kept_adapters is not None and self._adapters.leads:
            self._kept_adapters.keep(self._adapters.listed, answers)
        else:
            for asker, answer in answers:
                self._mail.send(asker, answer)

    def _send(self, words: Sequence[LimitWord]) -> None:
        for to, message in words:
            self._mail.send(to, message)

    async def _settle_limits(self) -> None:
        """Answer for limits once there has been time to get another scheduler's book."""
        await self._clock.sleep(SETTLE_S)
        self._send(self._limits.settle(self._scheduler.peer_schedulers, self._clock.now()))

    def _on_lost(self, peer: str) -> None:
        self._limits.lost(peer)
        self._defects.pop(peer, None)
        self._backlogs.pop(peer, None)
        self._joining.pop(peer, None)
        if self._others is not None:
            self._others.lose(peer)
        self._feed(PeerLost(peer))
        self._tell(self._adapters.lost(peer, self._scheduler.peer_schedulers, self._clock.now()))

    def _on_found(self, other: str) -> None:
        if self._others is not None:
            self._feed(PeersChanged(self.address, self._others.living, self._num_spares))
            self._tell(self._adapters.greet(other))
            self._send(self._limits.greet(other, self._clock.now()))

    async def _tick(self) -> None:
        while True:
            await self._waiting.wait()
            await self._clock.sleep(_TICK_S)
            self._feed(Tick())
            self._tell(self._adapters.tick(self._clock.now()))
            self._tell_backlog()

    def _tell_backlog(self) -> None:
        backlog = PeerBacklog(self._scheduler.num_queued, self._scheduler.queued_tokens)
        if backlog != self._told:
            self._told = backlog
            for other in self._scheduler.peer_schedulers:
                self._mail.send(other, backlog)

    def _feed(self, event: Event) -> None:
        for action in self._scheduler.on(event, self._clock.now()):
            self._mail.send(action.to, action.message)
        self.stirred.set()
        self._note_waiting()

    def _note_waiting(self) -> None:
        """Have time pass while anything waits for it."""
        if self._scheduler.needs_time or self._told.num_queued or self._adapters.is_changing:
            self._waiting.set()
        else:
            self._waiting.clear()

    def _note_defect(self, report: LoadReport) -> None:
        if report.defect and self._defects.get(report.address) != report.defect:
            log.error("instance %s found its block accounting broken: %s", report.address, report.defect)
        self._defects[report.address] = report.defect


def _asked_by(sender: str, message: PlaceRequest | NeedPrefill | Finished | AskSleep | AskWake) -> Event:
    match message:
        case PlaceRequest():
            return RequestArrived(sender, message)
        case NeedPrefill():
            return PrefillNeeded(sender, message)
        case Finished():
            return RequestLeft(sender, message)
        case AskSleep() | AskWake():
            return OperatorAsked(sender, message)


async def _but(me: str, resolve: Resolve) -> list[str]:
    """Return all that `resolve` finds, but for `me`."""
    return [address for address in await resolve() if address != me]
