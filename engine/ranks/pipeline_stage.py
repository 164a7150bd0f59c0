"""One rank of a pipeline: receives hidden states from the stage before, computes its layers, sends them on.

The last stage samples the tokens and sends them to the first, which needs them for the next step and waits for them only there.
So steps and their micro-batches follow each other without a gap as long as the next plan is here."""

import time
from collections import deque
from collections.abc import Sequence
from itertools import zip_longest

import torch

from core.kv import KVShard
from core.plan import FailedSeq, Sampled, SeqWork, StepPlan, StepResult
from core.ports import LayerDone, LayerSink
from engine.execution.batch.batch import RankSeq, build_batch
from engine.execution.batch.draft_states import DraftStates, draft_states
from engine.execution.batch.image_rows import ImageRows
from engine.execution.batch.prompt_outputs import read_prompts
from engine.execution.batch.step_memory import HostSteps, Pack
from engine.execution.graphs.step_graphs import StepGraphs
from engine.execution.pools.kv_pool import DevicePool
from engine.execution.runner import begin_step, layer_hook
from engine.execution.sampling.step_sampling import StepSampler, by_work, tokens_of
from engine.ranks.microbatches import micro_batches
from models.causal_model import CausalModel
from parallel.comm import Comm

_SampledWork = tuple[SeqWork, RankSeq]
_STEPS_AHEAD = 2
"""The tokens of a step so many steps back are certainly on their way, since the engine plans one step ahead."""


class StageRunner:
    def __init__(
        self,
        model: CausalModel,
        pool: DevicePool,
        shard: KVShard,
        comm: Comm,
        num_micro_batches: int,
        sink: LayerSink | None = None,
        *,
        sampler: StepSampler,
        graphs: StepGraphs | None = None,
        images: ImageRows | None = None,
    ) -> None:
        """`shard` is what `pool` has: of a model with recurrent layers the stage's own KV layers, whose slots have their states.
        `comm` joins this rank's stages, in order. `sampler` is used on the last stage, where tokens are sampled. `graphs` are
        of the stage's layers: parts of a step that fit are replayed, whether other stages replay theirs or not. `images`: on
        the first stage of a model that reads some."""
        self._images = images
        self._sampler, self._graphs, self._inputs = sampler, graphs, HostSteps(pool.device)
        self._model, self._pool, self._sink = model, pool, sink
        self._block_size, self._num_state_blocks = shard.layout.block_size, shard.layout.state_blocks
        self._first_kv_layer = shard.layers[0]
        self._comm, self._num_micro_batches = comm, num_micro_batches
        self._device, self._dtype = pool.device, model.dtype
        self._seqs: dict[str, RankSeq] = {}
        self._owed: deque[tuple[int, list[_SampledWork]]] = deque()
        """On the first stage, the (step, work and sequences that sample) whose tokens the last stage will send, in this order."""
        self._drafted: list[DraftStates] = []
        """What states take in of the step that runs when it is known what was sampled."""
        self._failed: list[FailedSeq] = []
        """The sequences that the step that runs could not compute."""

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Execute this stage's part of a plan. Returns when its KV is in the pool; the last stage's result has the tokens.

        Groups that share this stage's experts pass it as often as the one with the most parts."""
        started = time.perf_counter()
        while self._owed and self._owed[0][0] <= plan.step - _STEPS_AHEAD:
            self._learn()
        if self._model.is_last:
            self._sampler.begin(plan)
        layer_done = begin_step(plan, self._seqs, self._pool, self._sink)
        cut = [micro_batches(work, self._num_micro_batches) for work in plan.groups or (plan.work,)]
        parts = list(zip_longest(*cut, fillvalue=()))
        sampled: list[Sampled] = []
        graphs = self._graphs
        sizes = [0 if graphs is None else graphs.padded(*groups) for groups in parts]
        for number, (work, *_) in enumerate(parts):
            told = layer_done if number == len(cut[0]) - 1 else None
            sampled += self._run(plan.step, work, told, sizes[number])
        self._take_in(sampled)
        self._pool.finish()
        failed, self._failed = self._failed, []
        return StepResult(
            step=plan.step,
            sampled=tuple(sampled),
            duration_s=time.perf_counter() - started,
            replayed=bool(sizes) and all(sizes),
            failed=(*failed, *self._sampler.take_dead_ends()),
        )

    def _run(
        self,
        step: int,
        work: tuple[SeqWork, ...],
        layer_done: LayerDone | None,
        size: int,
    ) -> list[Sampled]:
        """Run a part of a step, by a replay for `size` sequences where that is not 0."""
        comm, model = self._comm, self._model
        seqs = [self._seqs[item.key] for item in work]
        to_sample = [(item, seq) for item, seq in zip(work, seqs, strict=True) if item.samples]
        if model.is_first:
            for item, seq in zip(work, seqs, strict=True):
                while seq.num_tokens < item.known_end and self._is_owed(seq):
                    self._learn()
        if size:
            hidden, rows = self._replayed(size, work, seqs, layer_done)
        else:
            hidden, rows = self._computed(work, seqs, layer_done)
        if not model.is_last:
            if work:
                comm.send(hidden, comm.rank + 1)
            if model.is_first and to_sample:
                self._owed.append((step, to_sample))
            return []
        read_prompts(model, hidden, work, seqs)
        if not to_sample:
            return []
        out = self._sampler.sample(rows, work, seqs)
        comm.send(tokens_of(work, out).to(self._device), 0)
        return list(out)

    def _computed(
        self, work: Sequence[SeqWork], seqs: Sequence[RankSeq], layer_done: LayerDone | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (T, hidden_size) of all tokens, and those rows behind which a token is sampled."""
        batch = build_batch(work, seqs, self._block_size, self._device, self._num_state_blocks)
        x = batch.tokens if self._model.is_first else self._states(len(batch.tokens))
        if self._images is not None:
            x, failed = self._images.embedded(x, work, seqs)
            self._failed += failed
        written = batch.written(self._block_size)
        on_layer = layer_hook(self._pool, written, layer_done, self._first_kv_layer)
        hidden = self._model.forward(x, batch.positions, self._pool.layers, batch.meta, on_layer)
        if (drafted := draft_states(work, batch)) is not None:
            self._drafted.append(drafted)
        return hidden, batch.sampled(hidden)

    def _replayed(
        self, size: int, work: Sequence[SeqWork], seqs: Sequence[RankSeq], layer_done: LayerDone | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same."""
        assert self._graphs is not None
        pack, inputs = Pack(), self._inputs.begin()
        replay = self._graphs.pack(size, work, seqs, pack)
        pack.send(inputs.upload)
        states = None if self._model.is_first else self._states(replay.num_rows)
        hidden = replay.hidden(inputs, states, layer_done, self._first_kv_layer)
        if not self._model.is_last:
            hidden = hidden.clone()  # the next part is replayed into this memory while it is still being sent
        return hidden, replay.sampled(hidden)

    def _states(self, num_tokens: int) -> torch.Tensor:
        """Return (T, hidden_size) from the stage before."""
        return self._receive((num_tokens, self._model.spec.hidden_size), self._dtype, self._comm.rank - 1)

    def _take_in(self, sampled: Sequence[Sampled]) -> None:
        """Say, or hear, which draft tokens were right. No step is planned ahead of that, so nothing is lost by waiting."""
        drafted, self._drafted = self._drafted, []
        while drafted and self._owed:
            self._learn()
        last = self._comm.size - 1
        for states in drafted:
            work = [item for item in states.work if item.samples]
            if self._model.is_last:
                tokens = tokens_of(work, sampled)
                for stage in range(last):
                    self._comm.send(tokens.to(self._device), stage)
            else:
                tokens = self._receive((sum(item.num_samples for item in work),), torch.int64, last)
            known = by_work(work, tokens)
            num_right = {item.key: max(0, len(own) - 1) for item, own in zip(work, known, strict=True)}
            states.take_in(num_right, self._pool, self._block_size)

    def _is_owed(self, seq: RankSeq) -> bool:
        return any(seq is owed for _, to_sample in self._owed for _, owed in to_sample)

    def _learn(self) -> None:
        _, to_sample = self._owed.popleft()
        work = [item for item, _ in to_sample]
        num_tokens = sum(item.num_samples for item in work)
        tokens = by_work(work, self._receive((num_tokens,), torch.int64, self._comm.size - 1))
        for (_, seq), known in zip(to_sample, tokens, strict=True):
            for token in known:
                seq.append(token)

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        if not shape[0]:
            return torch.empty(shape, dtype=dtype, device=self._device)  # nothing is sent for an empty tensor
        return self._comm.recv(shape, dtype, source)
