"""An instance that may sleep: its process and its address stay, its engine ends and starts anew.

Falling asleep is what an instance does that leaves on purpose, and waking up is a start, so whatever holds for those holds here:
no block is freed while somebody may write into it, and a peer never sees half an instance. What is kept of it (`KeptParts`) only
makes the start quick. Everything that changes is said to every scheduler, by `Asleep`."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial

from cluster.instance.instance import Instance
from cluster.instance.instance_parts import AsleepParts, InstanceParts, Role, SleepingParts, made_aside
from cluster.instance.lent_mail import LentMail
from cluster.instance.sleep_reporter import SleepReporter
from cluster.instance.wake_times import WakeTimes
from core.config.cluster_config import ClusterConfig
from core.messages import (
    CacheDropped,
    DropCache,
    Failed,
    HintSession,
    Message,
    PrefillFailed,
    SessionHinted,
    StartPrefill,
    Submit,
)
from core.ports import Clock, Mail, Resolve
from core.reports import DroppedBlocks
from core.sleep_messages import Asleep, GoToSleep, SleepLevel, SleepState, WakeUp

log = logging.getLogger(__name__)

_WHY = "the instance sleeps"


class ResidentInstance:
    """`run` begins to serve; `close` gives everything back. `failure` is set once its engine has stopped by itself, or it did not
    wake up."""

    def __init__(
        self,
        config: ClusterConfig,
        role: Role,
        mail: Mail,
        clock: Clock,
        resolve: Resolve,
        parts: InstanceParts | AsleepParts,
        *,
        num_spare_schedulers: int = 0,
        rests: str = "",
    ) -> None:
        """With `AsleepParts` it begins asleep, and if `rests` says why, until an operator wakes it."""
        self.role: Role = role
        self.failure: BaseException | None = None
        self.stuck = asyncio.Event()
        """As `Instance.stuck`, of any that it has."""
        self._config, self._mail, self._clock, self._resolve = config, mail, clock, resolve
        self._kept, self._site, self._num_spares = parts.kept, parts.site, num_spare_schedulers
        self._rests = rests
        self._lent = LentMail(mail)
        self.instance: Instance | None = self._made(parts) if isinstance(parts, InstanceParts) else None
        """None while it sleeps."""
        self._reporter = SleepReporter(config, mail, clock, resolve, num_spare_schedulers)
        self._times = WakeTimes()
        self._asked = asyncio.Queue[GoToSleep | WakeUp]()
        self._failed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._watching: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        return self._mail.address

    @property
    def computes(self) -> bool:
        """Whether a request that is placed here now would be computed, perhaps after waking up."""
        if self.failure is not None:
            return False
        return self.instance.computes if self.instance is not None else self._reporter.is_known

    def run(self) -> None:
        """Begin to serve, or to sleep."""
        self._mail.listen(self._on_message, self._on_lost)
        if self.instance is not None:
            self._times.began(self.instance.run())
            self._watch(self.instance)
        else:
            self._say("asleep", 2, held=bool(self._rests))
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._reporter.run())]

    async def failed(self) -> BaseException:
        """Wait until it has failed by itself, and return why."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    async def drain(self, timeout_s: float) -> None:
        """As `Instance.drain`. One that sleeps has nothing to drain."""
        await _end(self._tasks[:1])
        if self.instance is not None:
            await self.instance.drain(timeout_s)

    async def close(self) -> None:
        await _end(self._tasks + self._watching)
        if self.instance is not None:
            await self.instance.close()
        else:
            await self._mail.close()

    def _on_message(self, sender: str, message: Message) -> None:
        match message:
            case GoToSleep() | WakeUp():
                self._asked.put_nowait(message)
            case _ if self.instance is not None:
                self._lent.receive(sender, message)
            case _:
                self._refuse(sender, message)

    def _refuse(self, sender: str, message: Message) -> None:
        """Answer what was sent to one that serves, and came late."""
        match message:
            case Submit(request):
                self._mail.send(sender, Failed(request.id, request.attempt, _WHY, retryable=True))
            case StartPrefill(_, grant):
                self._mail.send(sender, PrefillFailed(grant.id, _WHY))
            case DropCache(nonce):
                self._mail.send(sender, CacheDropped(nonce, DroppedBlocks(device=0)))
            case HintSession(nonce):
                self._mail.send(sender, SessionHinted(nonce, known=False))
            case _:
                log.debug("%s has come while the instance sleeps", type(message).__name__)

    def _on_lost(self, peer: str) -> None:
        self._reporter.lost(peer)
        self._lent.lose(peer)

    async def _follow(self) -> None:
        """Do what is asked for, in order. To fall asleep twice, or to wake up twice, is to do so once."""
        while self.failure is None:
            asked = await self._asked.get()
            if self._kept is None:
                log.warning("the %s instance %s cannot sleep: it is a modelled one", self.role, self.address)
            elif isinstance(asked, GoToSleep):
                await self._end_service(asked)
                await self._rest(self._kept, asked)
            elif self.instance is None:
                await self._wake(self._kept)

    async def _end_service(self, asked: GoToSleep) -> None:
        """Have what runs here end or pause, and close the instance once nobody reads or writes its KV. One that sleeps is
        left as it is."""
        if (instance := self.instance) is None:
            return
        began_at = self._clock.now()
        self._say("falling asleep", asked.level, held=asked.held)
        await instance.drain(0.0 if asked.pauses else asked.timeout_s, moves=False)
        await instance.interrupt(f"{_WHY}: the request goes on after waking", self._settle_s)
        self.instance = None
        await _end(self._watching)
        self._watching.clear()  # ended tasks remember their frames, and so the instance
        self._lent.give_back()
        await instance.close()
        took_s = self._clock.now() - began_at
        log.info("the %s instance %s was closed in %.2f s, to sleep", self.role, self.address, took_s)

    async def _rest(self, kept: SleepingParts, asked: GoToSleep) -> None:
        """Keep what belongs to the level that is asked for, or less if less is left."""
        keeps_kv = self._config.schedule.residency.keeps_kv and not asked.drops
        level = await asyncio.to_thread(kept.sleep, asked.level, keeps_kv=keeps_kv)
        log.info("the %s instance %s sleeps at level %d", self.role, self.address, level)
        self._say("asleep", level, held=asked.held)

    async def _wake(self, kept: SleepingParts) -> None:
        """Start anew. Where that fails the instance has failed, and whoever keeps it starts another."""
        said = self._reporter.said
        assert said is not None, "it says so when it falls asleep"
        self._say("waking", said.level)
        try:
            parts = await made_aside(partial(kept.wake, asyncio.get_running_loop()))
            self._lent = LentMail(self._mail)
            self.instance = self._made(replace(parts, site=self._site))
        except Exception as error:
            log.exception("the %s instance %s did not wake up", self.role, self.address)
            self._fail(error)
            return
        self._times.woke(said.level, self.instance.run(begins=f"woken up from level {said.level}"))
        self._reporter.forget()
        self._watch(self.instance)

    def _made(self, parts: InstanceParts) -> Instance:
        return Instance(
            self._config,
            self.role,
            self._lent,
            self._clock,
            self._resolve,
            parts,
            num_spare_schedulers=self._num_spares,
        )

    def _say(self, state: SleepState, level: SleepLevel, *, held: bool = False) -> None:
        self._reporter.say(
            Asleep(
                address=self.address,
                state=state,
                level=level,
                prefills=self.role != "decode",
                decodes=self.role != "prefill",
                held=held,
                why=self._rests if held else "",
                wake_s=self._times.predicted_s(level),
            )
        )

    @property
    def _settle_s(self) -> float:
        """How long writers may take to end, with a fence."""
        return self._config.transfer.drain_timeout_s + self._config.mail.peer_timeout_s

    def _watch(self, instance: Instance) -> None:
        async def failing() -> None:
            self._fail(await instance.failed())

        async def sticking() -> None:
            await instance.stuck.wait()
            self.stuck.set()

        self._watching = [asyncio.create_task(failing()), asyncio.create_task(sticking())]

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._failed.set()


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
