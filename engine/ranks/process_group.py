"""A core.ports.WorkerGroup over ranks in processes of their own. Every rank gets every plan and executes it with the others.

One failed rank fails them all: the others are killed, whatever they wait for, before the failure is reported. A rank that has
sent nothing for `peer_timeout_s`, not even a Beat, has failed: it is stopped, stuck or cut off."""

import asyncio
import logging
from asyncio import StreamReader, StreamWriter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from core.config.adapter_config import HoldAdapters
from core.config.mail_config import MailConfig
from core.errors import Hung, ProtocolError, ReplicaLost
from core.plan import ExpertLoad, FailedSeq, Sampled, StepPlan, StepResult
from core.ports import LayerDone, LayerSink, OnReady
from engine.ranks.expert_balancer import Balancer
from engine.ranks.rank import Companion, Rank, Start, start_all
from engine.ranks.rank_messages import (
    FROM_RANK,
    AdaptersRefused,
    Beat,
    LayerReady,
    MaskReady,
    RankFailed,
    RankSetup,
    Ready,
    Relocate,
    frame,
    next_frame,
    open_streams,
)
from engine.ranks.rendezvous import StoreFile, StoreServer

log = logging.getLogger(__name__)

START_S = 600.0
_SETTLE_S = 0.2
"""The time to wait before asking which rank ended first, since its end makes its peers' collectives fail, too."""
_END_S = 3.0


@dataclass(slots=True, kw_only=True)
class _Step:
    plan: StepPlan
    future: "asyncio.Future[StepResult]"
    left: set[int]
    """The ranks that have not answered."""
    layer_done: LayerDone | None
    sampled: dict[str, Sampled] = field(default_factory=dict[str, Sampled])
    duration_s: float = 0.0
    proposing_s: float = 0.0
    reading_s: float = 0.0
    replayed: bool = False
    loads: tuple[ExpertLoad, ...] = ()
    failed: dict[str, FailedSeq] = field(default_factory=dict[str, FailedSeq])


@dataclass(slots=True)
class _Holding:
    """Ranks that load or give up adapters."""

    future: "asyncio.Future[dict[str, str]]"
    num_left: int
    refused: dict[str, str] = field(default_factory=dict[str, str])


class ProcessGroup:
    """Ranks in processes. Its constructor blocks until all ranks are ready, or raises."""

    def __init__(
        self,
        setups: Sequence[RankSetup],
        sink: LayerSink | None,
        start: Start,
        start_s: float = START_S,
        *,
        balancer: Balancer | None = None,
        companions: Sequence[Companion] = (),
        store: StoreServer | None = None,
        mail: MailConfig | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`balancer` says where experts go; None means that the model has none, or that they are all on one rank. Losing a
        companion is like losing a rank. `store`, which the group closes, is where ranks on several hosts find each other. `mail`
        says how often ranks beat and how long silent ones live. `loop` uses the group; None: the running one."""
        self._mail = mail or MailConfig()
        self._store = store or StoreFile()
        self.ranks: list[Rank] = []
        self.ready: list[Ready] = []
        try:
            meeting, beat_s = self._store.meeting, self._mail.heartbeat_s
            met = [replace(setup, meeting=meeting, beat_s=beat_s) for setup in setups]
            self.ranks, self.ready = start_all(start, met, start_s)
        except BaseException:
            self._store.close()
            raise
        if said := self.ready[0].graphs:
            log.info("%s: %s", self.ranks[0].name, said)
        self._sink, self._balancer = sink, balancer
        self._hear_ready: OnReady = lambda key, num_tokens: None
        self._steps: dict[int, _Step] = {}
        self._holding: _Holding | None = None
        self._writers: list[StreamWriter] = []
        self._reasons: dict[int, str] = {}
        self._ended: list[int] = []
        """The ranks whose connections have ended, in this order."""
        self._heard: set[int] = set()
        """The ranks that have sent something since they were last asked after."""
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        if loop is None:
            self._begin(companions)
        else:
            asyncio.run_coroutine_threadsafe(self._begin_there(companions), loop).result()

    async def _begin_there(self, companions: Sequence[Companion]) -> None:
        self._begin(companions)

    def _begin(self, companions: Sequence[Companion]) -> None:
        """Begin to hear of the ranks, on the loop that uses them."""
        loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[Exception] = loop.create_future()
        self._connecting = loop.create_task(self._connect())
        self._watching = [loop.create_task(self._watch(companion)) for companion in companions]
        self._watching.append(loop.create_task(self._watch_beats()))

    async def execute(self, plan: StepPlan) -> StepResult:
        """Execute a plan. Raises ReplicaLost once a rank has failed."""
        await asyncio.shield(self._connecting)
        if self._lost.done():
            raise self._lost.result()
        layer_done = self._sink.step_started(plan) if self._sink is not None else None
        future: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()
        self._steps[plan.step] = _Step(
            plan=plan, future=future, left=set(range(len(self.ranks))), layer_done=layer_done
        )
        data = frame(plan)
        if self._balancer is not None and (
            moves := self._balancer.next_moves(asyncio.get_running_loop().time())
        ):
            data = frame(Relocate(tuple(moves.items()))) + data
        for writer in self._writers:
            writer.write(data)
        return await future

    async def hold_adapters(self, asked: HoldAdapters) -> dict[str, str]:
        """Raises ReplicaLost once a rank has failed."""
        await asyncio.shield(self._connecting)
        if self._lost.done():
            raise self._lost.result()
        future: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._holding = _Holding(future, len(self.ranks))
        data = frame(asked)
        for writer in self._writers:
            writer.write(data)
        return await future

    def on_ready(self, hear: OnReady) -> None:
        self._hear_ready = hear

    async def lost(self) -> Exception:
        return await asyncio.shield(self._lost)

    async def give_up(self, why: str) -> Hung:
        await asyncio.shield(self._connecting)
        late = [number for step in [*self._steps.values()][:1] for number in step.left]
        error = Hung(f"{why}: {self._names(late)} did not answer" if late else why)
        if self._closing:  # a rank has ended meanwhile, and the others are being ended
            await asyncio.wait([self._lost], timeout=_END_S)
        else:
            self._closing = True
            await self._give_up(error)
        return error

    async def close(self) -> None:
        """Let the ranks finish what they have been given, for a moment, and end them."""
        self._closing = True
        for task in self._watching:
            task.cancel()
        await asyncio.shield(self._connecting)
        for writer in self._writers:
            with suppress(OSError, RuntimeError):  # uvloop's, where the rank has ended
                writer.write_eof()
        await self._end(_END_S)
        await asyncio.gather(*self._tasks, *self._watching, return_exceptions=True)

    async def _connect(self) -> None:
        for number, rank in enumerate(self.ranks):
            reader, writer = await open_streams(rank.sock)
            self._writers.append(writer)
            self._tasks.append(asyncio.get_running_loop().create_task(self._listen(number, reader)))

    async def _listen(self, number: int, reader: StreamReader) -> None:
        try:
            while True:
                self._on_word(number, await next_frame(reader, FROM_RANK))
                self._heard.add(number)
        except (asyncio.IncompleteReadError, OSError, ProtocolError) as error:
            log.debug("%s: %s", self.ranks[number].name, error)
            self._ended.append(number)
            if not self._closing:
                await self._fail()

    def _on_word(self, number: int, word: object) -> None:
        match word:
            case LayerReady(step, layer):
                layer_done = self._steps[step].layer_done
                if layer_done is not None:
                    layer_done(number, layer)
            case MaskReady(key, num_tokens):
                self._hear_ready(key, num_tokens)
            case Beat():
                pass
            case StepResult():
                self._on_result(number, word)
            case AdaptersRefused(refused) if self._holding is not None:
                self._on_held(self._holding, number, refused)
            case RankFailed(reason):
                self._reasons[number] = reason
            case _:
                raise ProtocolError(f"{self.ranks[number].name} said {type(word).__name__} out of turn")

    def _on_held(self, holding: _Holding, number: int, refused: Sequence[tuple[str, str]]) -> None:
        holding.refused.update({key: f"{self.ranks[number].name}: {why}" for key, why in refused})
        holding.num_left -= 1
        if not holding.num_left and not holding.future.done():
            holding.future.set_result(holding.refused)

    def _on_result(self, number: int, result: StepResult) -> None:
        step = self._steps[result.step]
        step.left.discard(number)
        step.duration_s = max(step.duration_s, result.duration_s)
        step.proposing_s = max(step.proposing_s, result.proposing_s)
        step.reading_s = max(step.reading_s, result.reading_s)
        step.replayed |= result.replayed
        step.sampled.update({sampled.key: sampled for sampled in result.sampled})
        step.failed.update({failure.key: failure for failure in result.failed})
        step.loads += (
            result.expert_loads if self._balancer is None else self._balancer.observe(result.expert_loads)
        )
        if not step.left:
            del self._steps[result.step]
            if not step.future.done():
                sampled = tuple(
                    step.sampled[work.key]
                    for work in step.plan.work
                    if work.samples and work.key in step.sampled
                )
                step.future.set_result(
                    StepResult(
                        step=result.step,
                        sampled=sampled,
                        duration_s=step.duration_s,
                        expert_loads=step.loads,
                        proposing_s=step.proposing_s,
                        reading_s=step.reading_s,
                        replayed=step.replayed,
                        failed=tuple(step.failed.values()),
                    )
                )

    async def _watch(self, companion: Companion) -> None:
        error = await companion.lost()
        await asyncio.shield(self._connecting)
        if not self._closing:
            self._closing = True
            await self._give_up(error)

    async def _watch_beats(self) -> None:
        """Count beats, not seconds, so that after a pause of this process its ranks get their full time again."""
        await asyncio.shield(self._connecting)
        beat_s, timeout_s = self._mail.heartbeat_s, self._mail.peer_timeout_s
        num_silent = [0] * len(self.ranks)
        while not self._closing:
            await asyncio.sleep(beat_s)
            num_silent = [0 if n in self._heard else count + 1 for n, count in enumerate(num_silent)]
            self._heard.clear()
            silent = [number for number, count in enumerate(num_silent) if count * beat_s >= timeout_s]
            if silent and not self._closing:
                self._closing = True
                await self._give_up(Hung(f"{self._names(silent)} sent nothing for {timeout_s:g} s"))

    def _names(self, numbers: Sequence[int]) -> str:
        return ", ".join(self.ranks[number].name for number in numbers)

    async def _fail(self) -> None:
        """Fail the group. The first rank whose connection ends gets here. It may be the cause of the others' ends or a
        consequence."""
        self._closing = True
        await asyncio.sleep(_SETTLE_S)
        culprit = self._culprit()
        reason = self._reasons.get(culprit)
        words = await asyncio.to_thread(self.ranks[culprit].obituary)
        await self._give_up(ReplicaLost(f"{words}: {reason}" if reason else words))

    async def _give_up(self, error: Exception) -> None:
        await self._end(0.0)
        self._lost.set_result(error)
        holding = [self._holding] if self._holding is not None else []
        for waited in (*self._steps.values(), *holding):
            if not waited.future.done():
                waited.future.set_exception(error)
        self._steps.clear()

    def _culprit(self) -> int:
        """Return the rank that caused the failure. A rank that ended without a word was killed, and comes first; then a rank that
        failed by itself; then the first that ended."""
        speechless = [number for number in self._ended if number not in self._reasons]
        own = [n for n, reason in self._reasons.items() if not reason.startswith(ReplicaLost.__name__)]
        return next(iter([*speechless, *own, *self._ended]))

    async def _end(self, patience_s: float) -> None:
        await asyncio.gather(*(asyncio.to_thread(rank.end, patience_s) for rank in self.ranks))
        for writer in self._writers:
            writer.close()
        self._store.close()
