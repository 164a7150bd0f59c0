"""One rank: executes StepPlans on its model and its KV pool, in order. A step may be launched while the last one computes."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.plan import FailedSeq, SeqWork, StepPlan, StepResult
from core.ports import LayerDone, LayerSink
from core.records import record
from device.poller import Poller
from device.seam import Event
from engine.execution.batch.batch import PackedBatch, RankSeq
from engine.execution.batch.draft_states import DraftStates, draft_states
from engine.execution.batch.image_rows import ImageRows
from engine.execution.batch.prompt_outputs import read_lens, read_prompts
from engine.execution.batch.step_memory import HostSteps, Pack, StepIO, Steps
from engine.execution.freeing import freeing
from engine.execution.graphs.step_graphs import Replay, StepGraphs
from engine.execution.pools.kv_pool import DevicePool
from engine.execution.sampling.step_sampling import Launched, StepSampler
from models.causal_model import CausalModel


@record(kw_only=True)
class LaunchedStep:
    """A step that a device computes, or has computed."""

    number: int
    started_at: float
    io: StepIO
    samples: Launched
    replayed: bool
    ends_first: bool
    """Whether it must be finished before another step is launched: ranks meet then, as they do in a launch."""
    over: Event
    drafted: DraftStates | None
    """What states take in when it is known what was sampled, if anything."""
    failed: tuple[FailedSeq, ...] = ()


@record()
class _Computed:
    hidden: Tensor
    """(T, hidden_size) of all tokens."""
    rows: Tensor
    """(N, hidden_size), those behind which a token is sampled."""
    drafted: DraftStates | None = None
    failed: tuple[FailedSeq, ...] = ()


class Runner:
    """Launches steps, and reads what they have sampled: in their order, perhaps a step later. For one thread."""

    def __init__(
        self,
        model: CausalModel,
        pool: DevicePool,
        block_size: int,
        sink: LayerSink | None = None,
        graphs: StepGraphs | None = None,
        *,
        sampler: StepSampler | None = None,
        num_state_blocks: int = 0,
        steps: Steps | None = None,
        on_hidden: Callable[[Tensor], None] | None = None,
        images: ImageRows | None = None,
    ) -> None:
        """`graphs` and `sampler` are of the same model. Without `sampler` no sequence can have a grammar. `num_state_blocks`:
        each sequence's first blocks, which have its recurrent state. `steps`: where inputs and results pass; without them a
        step's launch waits for its results. `on_hidden` is called with each step's (T, hidden_size), which the next step may
        overwrite. `images`: where the model reads some."""
        self._images = images
        self._model, self._pool, self._block_size, self._sink = model, pool, block_size, sink
        self._graphs, self._sampler = graphs, sampler or StepSampler(model)
        self._num_state_blocks, self._on_hidden = num_state_blocks, on_hidden
        self._steps = steps or HostSteps(pool.device)
        self._seqs: dict[str, RankSeq] = {}
        self._poller = Poller()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Execute a plan. Returns when every KV write of the step is in the pool and its tokens are sampled."""
        launched = freeing(self._launch, plan)
        self._pool.finish()
        if not launched.over.query():
            self._poller.wait([launched.over])
        return self._finish(launched)

    def awaits(self, plan: StepPlan) -> dict[str, str]:
        """Return which of its sequences `plan` cannot be launched for before the host knows what they have sampled, and why."""
        found: dict[str, str] = {}
        for item in plan.work:
            seq = self._seqs.get(item.key)
            # `SeqWork.known_end`, without a call for each of them in each step.
            is_ahead = seq is not None and item.start + item.count - len(item.drafts) > seq.num_tokens
            if seq is not None and is_ahead and (why := _why_waits(item, seq)):
                found[item.key] = why
        return found

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a plan behind all that was launched before. Raises OutOfMemory, having launched part of it."""
        return freeing(self._launch, plan)

    @torch.inference_mode()
    def finish(self, launched: LaunchedStep) -> StepResult:
        """Read what a step has sampled, which is over."""
        return self._finish(launched)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        started_at = time.perf_counter()
        self._sampler.begin(plan)
        layer_done = begin_step(plan, self._seqs, self._pool, self._sink)
        seqs = [self._seqs[item.key] for item in plan.work]
        io, pack, graphs = self._steps.begin(), Pack(), self._graphs
        size = 0
        if graphs is not None:
            size = graphs.padded(*(plan.groups or (plan.work,)))
        if graphs is not None and size:
            inputs: Replay | PackedBatch = graphs.pack(size, plan.work, seqs, pack)
        else:
            inputs = self._packed(plan, seqs, pack)
        asked = self._sampler.ask(plan.work, seqs, pack)
        pack.send(io.upload)
        computed = self._computed(plan.work, seqs, inputs, io, layer_done)
        if self._on_hidden is not None:
            self._on_hidden(computed.hidden)
        read_prompts(self._model, computed.hidden, plan.work, seqs)
        samples = self._sampler.launch(computed.rows, asked, io)
        return LaunchedStep(
            number=plan.step,
            started_at=started_at,
            io=io,
            samples=samples,
            replayed=isinstance(inputs, Replay),
            ends_first=self._sampler.meets_peers(asked),
            over=io.end(),
            drafted=computed.drafted,
            failed=computed.failed,
        )

    def _packed(self, plan: StepPlan, seqs: Sequence[RankSeq], pack: Pack) -> PackedBatch:
        only_decodes = plan.only_decodes
        read = None
        if not only_decodes and self._on_hidden is None:
            read = read_lens(plan.work, seqs)
        return PackedBatch(
            plan.work,
            seqs,
            self._block_size,
            pack,
            self._num_state_blocks,
            read,
            only_decodes=only_decodes,
        )

    def _finish(self, launched: LaunchedStep) -> StepResult:
        sampled = self._sampler.finish(launched.samples, launched.io)
        if launched.drafted is not None:
            num_right = {one.key: len(one.more) for one in sampled}
            launched.drafted.take_in(num_right, self._pool, self._block_size)
        return StepResult(
            step=launched.number,
            sampled=sampled,
            duration_s=time.perf_counter() - launched.started_at,
            replayed=launched.replayed,
            failed=launched.failed + self._sampler.take_dead_ends(),
        )

    def mark(self) -> Event:
        """Return what says when all that was launched is over, of a step that has found no memory, too."""
        return self._steps.mark()

    def close(self) -> None:
        """All steps are over."""
        self._steps.close()

    def _computed(
        self,
        work: Sequence[SeqWork],
        seqs: Sequence[RankSeq],
        inputs: Replay | PackedBatch,
        io: StepIO,
        layer_done: LayerDone | None,
    ) -> _Computed:
        if isinstance(inputs, Replay):
            hidden = inputs.hidden(io, layer_done=layer_done)
            return _Computed(hidden, inputs.sampled(hidden))
        batch, failed = inputs.batch(io), ()
        on_layer = layer_hook(self._pool, batch.written(self._block_size), layer_done)
        x = batch.tokens
        if self._images is not None:
            x, failed = self._images.embedded(x, work, seqs)
        hidden = self._model.forward(x, batch.positions, self._pool.layers, batch.meta, on_layer)
        return _Computed(hidden, batch.sampled(hidden), draft_states(work, batch), failed)


def _why_waits(item: SeqWork, seq: RankSeq) -> str:
    """Say why work on tokens that the host does not know all of cannot be launched; empty where it can."""
    if item.count > 1 or seq.place_of(item.start) is None:
        return "tokens that no step has sampled yet"
    return seq.host_needs if item.samples else ""


def begin_step(
    plan: StepPlan,
    seqs: dict[str, RankSeq],
    pool: DevicePool,
    sink: LayerSink | None,
) -> LayerDone | None:
    """Let sequences leave and come, and bring the blocks into the state that the step expects. Returns whom to tell of the step's
    layers, if anybody waits for them."""
    for key in plan.drop:
        seqs.pop(key, None)
    for new in plan.new:
        seqs[new.key] = RankSeq(new)
    if plan.size.num_drafts:
        for item in plan.work:
            if item.drafts:
                seqs[item.key].put_drafts(item)
    layer_done = sink.step_started(plan) if sink is not None else None
    pool.begin(plan)
    pool.copy_blocks(plan.copies)
    return layer_done


def layer_hook(
    pool: DevicePool, slots: torch.Tensor, layer_done: LayerDone | None, first_layer: int = 0
) -> Callable[[int], None] | None:
    """Return a hook to be called with each layer of the model's KV when that of the tokens at `slots` is computed. `first_layer`
    is the pool's first."""
    if not pool.is_told:
        return None if layer_done is None else lambda layer: layer_done(0, layer)

    def written(layer: int) -> None:
        pool.written(layer - first_layer, slots)
        if layer_done is not None:
            layer_done(0, layer)

    return written
