"""One instance whose steps are launched on a simulated device before the last one's tokens are on the host."""

import asyncio
from collections.abc import Container, Iterable, Sequence

from core.clock import WallClock
from core.config.cluster_config import EngineConfig
from core.errors import OutOfMemory
from core.kv import KVShard
from core.plan import FailedSeq, StepPlan, StepResult
from core.ports import WorkerGroup
from core.types import Request, TokenOut
from device.poller import Poller
from device.seam import Event
from device.simulated import SimulatedDevice
from engine.execution.batch.step_memory import StepMemory
from engine.execution.graphs.graph_capture import again
from engine.execution.graphs.step_graphs import StepGraphs
from engine.execution.inline_group import InlineGroup
from engine.execution.launching_group import LaunchingGroup
from engine.execution.pools.kv_pool import KVPool
from engine.execution.runner import LaunchedStep, Runner
from engine.execution.sampling.grammar_masks import GrammarMasks
from engine.execution.sampling.grammar_matcher import Matchers
from engine.execution.sampling.step_sampling import StepSampler
from engine.loop import Engine
from engine.planning.speculation.speculator import make_speculator
from engine.planning.step_scheduler import StepScheduler
from models.causal_model import CausalModel
from tests.engine.execution.test_runner import resident_pool
from tests.engine.fifo_policy import FifoPolicy
from tests.even_steps import EvenSteps
from tests.models.checkpoints import CPU

BLOCK_SIZE, MAX_CONTEXT = 4, 128


class Answers:
    """core.ports.EngineEvents"""

    def __init__(self, ids: Iterable[str]) -> None:
        self.said: dict[str, list[TokenOut]] = {id: [] for id in ids}
        self._left = set(self.said)
        self.all: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        for token in tokens:
            self.said[token.request_id].append(token)
            if token.finish is not None:
                self._left.remove(token.request_id)
        if not self._left:
            self.all.set_result(None)

    def on_stuck(self, keys: list[str]) -> None:
        raise AssertionError(f"{keys} are stuck")

    def on_taken_back(self, paused: list[str], lost: list[str]) -> None:
        raise AssertionError(f"nothing sends {paused} and {lost} on")

    def on_failed(self, failed: Sequence[FailedSeq]) -> None:
        raise AssertionError(f"{failed} have no images")

    def on_error(self, error: BaseException) -> None:
        self.all.set_exception(error)


class Watched:
    """A Launcher that counts."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.close = runner, runner.close
        self._num_in_flight = self.num_overlapped = self.num_replayed = 0
        self.awaited: dict[str, str] = {}
        self.most_tokens = 1 << 30
        """The tokens of a step for which there is memory."""
        self.unread: Container[int] = ()
        """The steps whose results find none, counted from 0."""
        self._num_read = 0

    def awaits(self, plan: StepPlan) -> dict[str, str]:
        found = self._runner.awaits(plan)
        self.awaited |= found
        return found

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.num_overlapped += self._num_in_flight > 0
        launched = self._runner.launch(plan)
        if plan.num_tokens > self.most_tokens:
            raise OutOfMemory(f"{plan.num_tokens} tokens are too many")
        self._num_in_flight += 1
        return launched

    def mark(self) -> Event:
        return self._runner.mark()

    def finish(self, launched: LaunchedStep) -> StepResult:
        self._num_in_flight -= 1
        result = self._runner.finish(launched)
        number, self._num_read = self._num_read, self._num_read + 1
        if number in self.unread:
            self._num_in_flight = 0  # what was launched behind it is dropped
            raise OutOfMemory("no memory for a result")
        self.num_replayed += result.replayed
        return result


class Launching:
    """For one `run`."""

    def __init__(
        self,
        model: CausalModel,
        num_blocks: int = 200,
        sizes: Sequence[int] = (),
        matchers: Matchers | None = None,
        *,
        launching: bool = True,
        **config: object,
    ) -> None:
        """`sizes` of decode steps are replayed. `launching`: otherwise each step's tokens are waited for, in host memory."""
        settings = EngineConfig(**{"block_size": BLOCK_SIZE, **config})  # type: ignore[arg-type]
        self._settings, self._model, self._num_blocks = settings, model, num_blocks
        self._grammars = GrammarMasks(matchers) if matchers is not None else None
        self.device = SimulatedDevice(seed=num_blocks)
        self.watched: Watched | None = None
        layout = model.spec.kv_layout(settings.block_size, "float32")
        self._shard, self._num_states = KVShard.whole(layout), layout.state_blocks
        self._group = self._launching(sizes) if launching else self._inline()

    async def run(self, requests: Sequence[Request]) -> dict[str, list[TokenOut]]:
        scheduler = StepScheduler(
            self._settings,
            self._num_blocks,
            MAX_CONTEXT,
            FifoPolicy(),
            speculator=make_speculator(self._settings, MAX_CONTEXT),
            num_state_blocks=self._num_states,
        )
        group = EvenSteps(self._group) if self._settings.speculate != "none" else self._group
        engine, answers = Engine(scheduler, group, WallClock()), Answers(each.id for each in requests)
        task = asyncio.create_task(engine.run(answers))
        for request in requests:
            engine.add(request)
        try:
            await asyncio.wait_for(answers.all, 60)
        finally:
            await engine.close()
            await task
            self.device.close()
        self.num_preempted, self.work = scheduler.load().num_preempted, engine.work_counts()
        scheduler.check_integrity()
        assert not self.device.violations
        return answers.said

    def _inline(self) -> WorkerGroup:
        memory = memoryview(bytearray(self._shard.pool_bytes(self._num_blocks)))
        pool = KVPool(self._shard, self._num_blocks, memory)
        sampler = StepSampler(self._model, self._grammars)
        runner = Runner(self._model, pool, BLOCK_SIZE, sampler=sampler, num_state_blocks=self._num_states)
        return InlineGroup(runner.step, self._grammars)

    def _launching(self, sizes: Sequence[int]) -> WorkerGroup:
        pool = resident_pool(self._shard, self._num_blocks, self.device)
        most = MAX_CONTEXT // BLOCK_SIZE
        graphs = StepGraphs(self._model, pool, BLOCK_SIZE, most, sizes, again, max_seqs=64) if sizes else None
        runner = Runner(
            self._model,
            pool,
            BLOCK_SIZE,
            graphs=graphs,
            sampler=StepSampler(self._model, self._grammars),
            num_state_blocks=self._num_states,
            steps=StepMemory(self.device, CPU, self._settings.max_batch_tokens),
        )
        self.watched = Watched(runner)
        return LaunchingGroup(self.watched, self.watched.finish, Poller(), self._grammars)
