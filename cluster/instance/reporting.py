"""An instance's reports to the schedulers. It registers with each, reports its load to all, and starts anew with one that was
restarted."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from core.messages import Leaving, Message
from core.ports import Clock, Mail, Resolve
from core.reports import LayerExperts, LinkSpeed, LoadReport, Register, StartTimes, WorkCounts
from core.turns import TURN_S, in_turn
from engine.loop import Engine, EngineLoad
from net.schedulers import Schedulers

log = logging.getLogger(__name__)

_IDLE_REPORT_S = 1.0
_EXPERTS_S = 5.0
"""The time between two reports of expert counts, which are many: layers x experts."""


class Reporter:
    """Runs beside a worker. `check` is the idle self-check; what it raises is reported as the instance's defect."""

    def __init__(
        self,
        info: Register,
        engine: Engine,
        mail: Mail,
        clock: Clock,
        *,
        resolve: Resolve,
        num_schedulers: int,
        interval_s: float,
        check: Callable[[], None],
        count: Callable[[], WorkCounts],
        links: Callable[[], tuple[LinkSpeed, ...]],
        drain_sent: Callable[[], tuple[str, ...]],
        first_words: Callable[[], tuple[Message, ...]] = tuple,
        num_spare_schedulers: int = 0,
    ) -> None:
        """`first_words` are what a scheduler that knows nothing is told before all else."""
        self._info, self._engine, self._mail, self._clock = info, engine, mail, clock
        self._interval_s = interval_s
        self._check, self._count, self._links, self._drain_sent = check, count, links, drain_sent
        self._first_words = first_words
        self._schedulers = Schedulers(
            resolve, num_schedulers, clock, self._found, num_spares=num_spare_schedulers
        )
        self._new: set[str] = set()
        """Schedulers that have been told nothing yet."""
        self._any_new = asyncio.Event()
        self._leaving = False
        self._seq = 0
        self._last: EngineLoad | None = None
        self._defect = ""
        self._experts_due_at: float | None = None
        """When the counts are due. None means that some scheduler knows none of them."""

    @property
    def scheduler(self) -> str:
        """A scheduler that lives; empty where none is known."""
        return self._schedulers.first

    @property
    def is_known(self) -> bool:
        """Whether some scheduler has been told of the instance. Its end makes no difference: the next one is told, too."""
        return self._last is not None

    def started(self, start: StartTimes) -> None:
        """Introduce the instance with how long it has taken to start. For before `run`."""
        self._info = replace(self._info, start=start)

    def peer_lost(self, peer: str) -> None:
        if self._schedulers.lose(peer):
            self._new.discard(peer)

    def tell(self, message: Message) -> None:
        """Tell every scheduler. Those that are still to be introduced hear it then, in `first_words`."""
        for scheduler in self._schedulers.living:
            if scheduler not in self._new:
                self._mail.send(scheduler, message)

    def leave(self, *, hung: bool = False) -> None:
        """Tell the schedulers, and any that comes after them, to place nothing more here."""
        self._leaving = True
        for scheduler in self._schedulers.living:
            self._mail.send(scheduler, Leaving(self._info.address, hung))

    async def run(self) -> None:
        watching = asyncio.create_task(self._schedulers.run())
        try:
            while True:
                await self._watch_load()
        finally:
            watching.cancel()

    async def _watch_load(self) -> None:
        """Watch the load until all schedulers are lost and another one has come."""
        idle_since = self._clock.now()
        while self._schedulers.living:
            if self._new:
                self._introduce()
                idle_since = self._clock.now()
            load, now, took_s = self._engine.load(), self._clock.now(), 0.0
            if load != self._last:
                took_s = await self._report(load)
                idle_since = now
            elif now - idle_since >= _IDLE_REPORT_S:
                if not load.planned.num_running and not load.planned.num_waiting:
                    self._self_check()
                took_s = await self._report(load)
                idle_since = now
            await self._clock.sleep(max(0.0, self._interval_s - took_s))
        self._any_new.clear()
        await self._any_new.wait()

    def _found(self, scheduler: str) -> None:
        self._new.add(scheduler)
        self._any_new.set()

    def _introduce(self) -> None:
        """Introduce the instance to new schedulers, which know nothing and begin with all that is cached. The others are told
        before that what is new to them."""
        new, self._new = sorted(self._new), set[str]()
        load, others = self._engine.load(), [one for one in self._schedulers.living if one not in new]
        if others:
            last = self._compose(load)
            for scheduler in others:
                self._mail.send(scheduler, last)
        self._engine.cached.replay_cache_events()
        self._experts_due_at = None
        first = self._compose(load)
        for scheduler in new:
            for word in self._first_words():
                self._mail.send(scheduler, word)
            self._mail.send(scheduler, self._info)
            if self._leaving:
                self._mail.send(scheduler, Leaving(self._info.address))
            self._mail.send(scheduler, first)

    def _experts(self) -> tuple[LayerExperts, ...]:
        now, due_at = self._clock.now(), self._experts_due_at
        if due_at is not None and now < due_at:
            return ()
        self._experts_due_at = now + _EXPERTS_S
        return self._engine.drain_experts(again=due_at is None)

    def _self_check(self) -> None:
        try:
            self._check()
            self._defect = ""
        except Exception as error:
            self._defect = str(error)
            log.exception("the idle self-check failed")

    async def _report(self, load: EngineLoad) -> float:
        """Report to each scheduler in turn, to a spare last, and return the time that this has taken."""
        report, placing = self._compose(load), self._schedulers.placing
        turns = in_turn(placing, self._info.address, report.seq)
        turns += [spare for spare in self._schedulers.living if spare not in placing]
        for turn, scheduler in enumerate(turns):
            if turn:
                await self._clock.sleep(TURN_S)
            if scheduler in self._schedulers.living and scheduler not in self._new:
                self._mail.send(scheduler, report)
        return TURN_S * (len(turns) - 1)

    def _compose(self, load: EngineLoad) -> LoadReport:
        planned = load.planned
        added, removed = self._engine.cached.drain_cache_events()
        self._seq += 1
        self._last = load
        return LoadReport(
            address=self._info.address,
            seq=self._seq,
            free_blocks=planned.num_available_blocks,
            waiting_tokens=planned.num_waiting_tokens,
            waiting_by_priority=planned.waiting_by_priority,
            num_waiting=planned.num_waiting,
            num_running=planned.num_running,
            tokens_per_s=load.tokens_per_s,
            step_s=load.step_s,
            cache_added=added,
            cache_removed=removed,
            defect=self._defect,
            tiers=self._engine.tier_counts(),
            num_decoding=planned.num_decoding,
            context_tokens=planned.num_context_tokens,
            received=self._engine.drain_received(),
            steps=load.steps,
            late_tokens=planned.num_late_tokens,
            pausable_blocks=planned.pausable_blocks,
            work=self._count(),
            experts=self._experts(),
            links=self._links(),
            sent=self._drain_sent(),
            grown=self._engine.drain_grown(),
        )
