"""An instance's word to the global scheduler: it registers, reports its load, and does both again after either was reborn."""

import logging
from collections.abc import Callable

from core.messages import Leaving
from core.ports import Clock, Mail, Resolve
from core.reports import LayerExperts, LoadReport, Register, WorkCounts
from engine.loop import Engine, EngineLoad

log = logging.getLogger(__name__)

_IDLE_REPORT_S = 1.0
_RETRY_S = 0.2
_EXPERTS_S = 5.0
"""Counts of layers x experts are many: they are reported only so often."""


class Reporter:
    """Runs beside a worker. `check` is the idle self-check; what it raises is reported as the instance's defect."""

    def __init__(
        self,
        info: Register,
        engine: Engine,
        mail: Mail,
        clock: Clock,
        resolve: Resolve,
        interval_s: float,
        check: Callable[[], None],
        count: Callable[[], WorkCounts],
    ) -> None:
        self._info, self._engine, self._mail, self._clock = info, engine, mail, clock
        self._resolve, self._interval_s = resolve, interval_s
        self._check, self._count = check, count
        self.scheduler = ""
        self._lost = self._leaving = False
        self._seq = 0
        self._last: EngineLoad | None = None
        self._defect = ""
        self._experts_due_s: float | None = None
        """None: a scheduler that knows none of them."""

    def peer_lost(self, peer: str) -> None:
        if peer == self.scheduler:
            self.scheduler, self._lost = "", True

    def leave(self) -> None:
        """Tell the scheduler, and any that comes after it, to place nothing more here."""
        self._leaving = True
        if self.scheduler:
            self._mail.send(self.scheduler, Leaving(self._info.address))

    async def run(self) -> None:
        idle_since = self._clock.now()
        while True:
            if not self.scheduler:
                await self._register()
                idle_since = self._clock.now()
            load = self._engine.load()
            now = self._clock.now()
            if load != self._last:
                self._report(load)
                idle_since = now
            elif now - idle_since >= _IDLE_REPORT_S:
                if not load.num_running and not load.num_waiting:
                    self._self_check()
                self._report(load)
                idle_since = now
            await self._clock.sleep(self._interval_s)

    async def _register(self) -> None:
        """The scheduler forgets a lost instance, and a reborn scheduler knows none: begin with everything cached."""
        while not self.scheduler:
            try:
                self.scheduler = await self._resolve()
            except Exception as error:
                log.warning("cannot find the scheduler: %s", error)
                await self._clock.sleep(_RETRY_S)
        if self._lost:
            await self._clock.sleep(_RETRY_S)
            self._lost = False
        self._mail.send(self.scheduler, self._info)
        if self._leaving:
            self.leave()
        self._engine.replay_cache_events()
        self._last = None
        self._experts_due_s = None

    def _experts(self) -> tuple[LayerExperts, ...]:
        now, due_s = self._clock.now(), self._experts_due_s
        if due_s is not None and now < due_s:
            return ()
        self._experts_due_s = now + _EXPERTS_S
        return self._engine.drain_experts(again=due_s is None)

    def _self_check(self) -> None:
        try:
            self._check()
            self._defect = ""
        except Exception as error:
            self._defect = str(error)
            log.exception("the idle self-check failed")

    def _report(self, load: EngineLoad) -> None:
        added, removed = self._engine.drain_cache_events()
        self._seq += 1
        self._last = load
        report = LoadReport(
            self._info.address,
            self._seq,
            load.free_blocks,
            load.waiting_tokens,
            load.num_waiting,
            load.num_running,
            load.tokens_per_s,
            load.step_s,
            added,
            removed,
            self._defect,
            self._engine.tier_counts(),
            load.num_decoding,
            load.context_tokens,
            self._engine.drain_received(),
            load.steps,
            self._count(),
            self._experts(),
        )
        self._mail.send(self.scheduler, report)
