"""A step's tokens on one rank: sampled from its logits, or heard from the rank that samples for all that hold the same sequences.

Tokens are sampled where the logits are. The host hears of them when it asks, perhaps after the next step's are sampled.

A sequence whose mask is late samples nothing. The planner gives it its last token to compute again when the mask is made. What a
step planned meanwhile computes for it stands on a token that does not exist yet, so nothing is sampled from that either."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import torch

from core.plan import FailedSeq, Sampled, SampledToken, SeqWork, StepPlan
from core.records import record
from engine.execution.batch.batch import History, RankSeq
from engine.execution.batch.prompt_outputs import with_prompt
from engine.execution.batch.step_memory import HostSteps, Pack, StepIO
from engine.execution.sampling.grammar_masks import GrammarMasks
from engine.execution.sampling.logit_processors import RowsAsked
from engine.execution.sampling.sampler import RowSampling
from engine.execution.sampling.verifying import histories, verified
from models.causal_model import CausalModel

NOTHING = -1
"""In place of a token, where a sequence has sampled none."""


_SampledWork = tuple[SeqWork, RankSeq]
"""A work that samples, and its sequence."""


@record()
class Asked:
    """What a step is going to sample."""

    to_sample: Sequence[_SampledWork]
    rows: RowSampling | None
    """None where grammars take part, whose masks are made while the model computes."""

    @property
    def is_bound(self) -> bool:
        return self.rows is None


@record()
class Launched:
    """Samples whose results are on their way to the host."""

    asked: Asked
    device: torch.device
    to_sample: Sequence[_SampledWork] = ()
    """The part of `asked` that could be sampled."""
    rows: RowSampling | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that hold the same sequences and have the same logits. One of them owns the matchers: in a step in which a
    sequence with a grammar samples, the others hear from it what each has sampled."""

    owns_matchers: bool
    total: Callable[[torch.Tensor], torch.Tensor]
    """The sum over all of them, in place."""


class StepSampler:
    """Call `begin`, `ask`, `launch` and `finish` for each step, in this order. Steps are launched and finished in their order."""

    def __init__(
        self, model: CausalModel, grammars: GrammarMasks | None = None, peers: Peers | None = None
    ) -> None:
        """`grammars` is None on ranks that do not own the matchers, and where no sequence can have a grammar. `peers` is None
        where there are none."""
        self._model, self._grammars, self._peers = model, grammars, peers
        self._rows_asked = RowsAsked([])
        self._dead_ends: tuple[FailedSeq, ...] = ()

    def begin(self, plan: StepPlan) -> None:
        """Before the forward pass."""
        if self._grammars is not None:
            self._grammars.begin(plan)

    def ask(self, work: Sequence[SeqWork], seqs: Sequence[RankSeq], pack: Pack) -> Asked:
        """Work out what `work` samples, and add to `pack` what is known of it before the forward pass."""
        to_sample = [(item, seq) for item, seq in zip(work, seqs, strict=True) if item.samples]
        asked = self._asked(to_sample)
        if asked.has_grammar:
            return Asked(to_sample, None)
        return Asked(to_sample, RowSampling(_histories(to_sample, asked), pack, asked=asked))

    def meets_peers(self, asked: Asked) -> bool:
        """Return whether `finish` of this step meets the peers."""
        return self._peers is not None and asked.is_bound and bool(asked.to_sample)

    def launch(self, hidden: torch.Tensor, asked: Asked, step: StepIO) -> Launched:
        """Sample the next tokens, but for sequences whose masks are late.

        `hidden` (N, hidden_size) are the states of the last known token, and of the drafts behind it, of the sequences that
        sample, in their order."""
        if not asked.to_sample:
            return Launched(asked, hidden.device)
        logits = self._model.logits(hidden)
        to_sample, rows = asked.to_sample, asked.rows
        if rows is None:
            to_sample = self._ready(to_sample) if self._owns_matchers else []
            if not to_sample:
                return Launched(asked, hidden.device)
            logits, rows = self._masked(logits, asked.to_sample, to_sample, step)
        step.give(rows.sample(logits, self._model.ops, step))
        if (place := step.place()) is not None:
            _note_places(to_sample, place)
        return Launched(asked, hidden.device, to_sample, rows)

    def finish(self, launched: Launched, step: StepIO) -> tuple[Sampled, ...]:
        """Return what was sampled, and append it to the sequences. The step is over."""
        asked = launched.asked.to_sample
        if not asked:
            return ()
        results: list[Sampled] = []
        if launched.rows is not None:
            keys = [item.key for item, _ in _by_row(launched.to_sample)]
            self._dead_ends += launched.rows.dead_ends(keys)
            sampled = launched.rows.sampled(keys, step.read())
            results = verified([item for item, _ in launched.to_sample], sampled)
        if self._peers is not None and launched.asked.is_bound:
            results = self._shared(self._peers, [item for item, _ in asked], results, launched.device)
        seqs = _sampled_seqs(asked, results)
        for one, seq in zip(results, seqs, strict=True):
            seq.append(one.token)
            for further in one.more:
                seq.append(further.token)
        if self._grammars is not None and launched.asked.is_bound:
            self._grammars.sampled({one.key: one.tokens for one in results})
        if not any(seq.reads_prompt for seq in seqs):
            return tuple(results)
        return tuple(
            with_prompt(one, seq, self._model.readout) for one, seq in zip(results, seqs, strict=True)
        )

    def take_dead_ends(self) -> tuple[FailedSeq, ...]:
        """Return those of the sequences that `finish` was called with whose grammars allowed nothing, each once."""
        found, self._dead_ends = self._dead_ends, ()
        return found

    def sample(
        self, hidden: torch.Tensor, work: Sequence[SeqWork], seqs: Sequence[RankSeq]
    ) -> tuple[Sampled, ...]:
        """Launch and finish at once."""
        pack, step = Pack(), HostSteps(hidden.device).begin()
        asked = self.ask(work, seqs, pack)
        pack.send(step.upload)
        return self.finish(self.launch(hidden, asked, step), step)

    def _asked(self, to_sample: Sequence[_SampledWork]) -> RowsAsked:
        """What the rows of `to_sample` ask for, worked out anew when other sequences sample."""
        samplings = [seq.sampling for _, seq in _by_row(to_sample)]
        if self._rows_asked.samplings != samplings:
            self._rows_asked = RowsAsked(samplings)
        # The very objects: those of the next step are compared by identity then, and not field by field.
        self._rows_asked.samplings = samplings
        return self._rows_asked

    @property
    def _owns_matchers(self) -> bool:
        return self._peers is None or self._peers.owns_matchers

    def _ready(self, to_sample: Sequence[_SampledWork]) -> list[_SampledWork]:
        """Return what can be sampled of `to_sample`."""
        grammars, there = self._grammars, [(item, seq) for item, seq in to_sample if _stands(item, seq)]
        if grammars is None:
            return there
        late = grammars.late(item.key for item, _ in to_sample)
        return [(_cut(item, grammars.num_rows(item.key)), seq) for item, seq in there if item.key not in late]

    def _masked(
        self,
        logits: torch.Tensor,
        asked: Sequence[_SampledWork],
        to_sample: Sequence[_SampledWork],
        step: StepIO,
    ) -> tuple[torch.Tensor, RowSampling]:
        """Return the rows of `to_sample`, a part of `asked`, and what they ask for with their masks."""
        pack = Pack()
        masks = (
            self._grammars.masks([item.key for item, _ in _by_row(to_sample)])
            if self._grammars is not None
            else None
        )
        each = self._asked(to_sample)
        rows = RowSampling(_histories(to_sample, each), pack, masks, each)
        own = _rows_of(to_sample, asked)
        ours = pack.add(np.array(own)) if len(own) < len(logits) else None
        pack.send(step.upload)
        return logits if ours is None else logits.index_select(0, ours()), rows

    def _shared(
        self, peers: Peers, work: Sequence[SeqWork], results: Sequence[Sampled], device: torch.device
    ) -> list[Sampled]:
        """Say what was sampled, or hear of it."""
        if peers.owns_matchers:
            peers.total(tokens_of(work, results).to(device))
            return [*results]
        nothing = torch.zeros(sum(item.num_samples for item in work), dtype=torch.int64, device=device)
        return _heard(work, peers.total(nothing))


def _sampled_seqs(asked: Sequence[_SampledWork], results: Sequence[Sampled]) -> list[RankSeq]:
    """Return the sequences that have sampled, which are in the order of `asked`."""
    if len(results) == len(asked):
        return [seq for _, seq in asked]
    seq_of = {item.key: seq for item, seq in asked}
    return [seq_of[one.key] for one in results]


def _histories(to_sample: Iterable[_SampledWork], asked: RowsAsked) -> list[History]:
    """Return those of all rows; none where no sample depends on one."""
    if not asked.reads_history:
        return []
    return list(chain(*(histories(item, seq) for item, seq in to_sample)))


def _by_row(to_sample: Sequence[_SampledWork]) -> Sequence[_SampledWork]:
    """Return which each row belongs to."""
    if not any(item.drafts for item, _ in to_sample):
        return to_sample
    return [(item, seq) for item, seq in to_sample for _ in range(item.num_samples)]


def _rows_of(to_sample: Iterable[_SampledWork], asked: Iterable[_SampledWork]) -> list[int]:
    """Return which rows of `asked` belong to `to_sample`, a part of it."""
    num_samples = {item.key: item.num_samples for item, _ in to_sample}
    rows, first = list[int](), 0
    for item, _ in asked:
        rows += range(first, first + num_samples.get(item.key, 0))
        first += item.num_samples
    return rows


def _stands(item: SeqWork, seq: RankSeq) -> bool:
    """Return whether the token behind which it samples exists."""
    return item.known_end == seq.num_tokens or seq.place_of(item.known_end - 1) is not None


def _cut(item: SeqWork, num_rows: int | None) -> SeqWork:
    """Return it with at most so many rows: draft tokens behind which there is no mask are not verified."""
    surplus = item.num_samples - num_rows if num_rows is not None else 0
    if surplus <= 0:
        return item
    return replace(item, count=item.count - surplus, drafts=item.drafts[:-surplus])


def _note_places(to_sample: Iterable[_SampledWork], place: int) -> None:
    """Tell the sequences where the next step finds what they sample, but those with draft tokens. `place` is that of the first
    row."""
    for item, seq in to_sample:
        if item.drafts:
            place += item.num_samples
        else:
            seq.sampled_at, seq.place = item.start + item.count, place
            place += 1


def tokens_of(work: Sequence[SeqWork], results: Sequence[Sampled]) -> torch.Tensor:
    """Return (N,) int64: for each work that samples a token for each row, or NOTHING. `by_work` reads them."""
    tokens_by_key = {one.key: one.tokens for one in results}
    out: list[int] = []
    for item in work:
        if item.samples:
            tokens = tokens_by_key.get(item.key, [])
            out += tokens + [NOTHING] * (item.num_samples - len(tokens))
    return torch.tensor(out, dtype=torch.int64)


def by_work(work: Iterable[SeqWork], tokens: torch.Tensor) -> list[list[int]]:
    """Return what each of `work`, all of which sample, has sampled, from what `tokens_of` gave."""
    rest = iter(tokens.tolist())
    return [[token for token in islice(rest, item.num_samples) if token != NOTHING] for item in work]


def _heard(work: Sequence[SeqWork], tokens: torch.Tensor) -> list[Sampled]:
    return [
        Sampled(item.key, results[0], more=tuple(SampledToken(token) for token in results[1:]))
        for item, results in zip(work, by_work(work, tokens), strict=True)
        if results
    ]
