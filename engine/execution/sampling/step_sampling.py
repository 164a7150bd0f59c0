"""A step's tokens on one rank: drawn from its logits, or heard from the rank that draws for all that hold the same sequences.

Tokens are drawn where the logits are. The host hears of them when it asks, perhaps after the next step's are drawn.

A sequence whose mask is late draws nothing. The planner gives it its last token to compute again when the mask is made. What a
step planned meanwhile computes for it stands on a token that does not exist yet, so nothing is drawn from that either."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import torch

from core.plan import Drawn, FailedSeq, Sampled, SeqWork, StepPlan
from core.records import record
from engine.execution.batch.batch import History, RankSeq
from engine.execution.batch.prompt_outputs import with_prompt
from engine.execution.batch.step_memory import HostSteps, Pack, StepIO
from engine.execution.sampling.grammar_masks import GrammarMasks
from engine.execution.sampling.logit_processors import RowsAsked
from engine.execution.sampling.sampler import RowDraws
from engine.execution.sampling.verifying import histories, verified
from models.causal_model import CausalModel

NOTHING = -1
"""In place of a token, where a sequence has drawn none."""


_Drawing = tuple[SeqWork, RankSeq]
"""A work that draws, and its sequence."""


@record()
class Asked:
    """What a step is going to draw."""

    drawing: Sequence[_Drawing]
    rows: RowDraws | None
    """None where grammars take part, whose masks are made while the model computes."""

    @property
    def is_bound(self) -> bool:
        return self.rows is None


@record()
class Launched:
    """Draws whose results are on their way to the host."""

    asked: Asked
    device: torch.device
    drawing: Sequence[_Drawing] = ()
    """The part of `asked` that could be drawn."""
    rows: RowDraws | None = None


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that hold the same sequences and have the same logits. One of them owns the matchers: in a step in which a
    sequence with a grammar draws, the others hear from it what each has drawn."""

    owns_matchers: bool
    total: Callable[[torch.Tensor], torch.Tensor]
    """The sum over all of them, in place."""


class Draws:
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
        """Work out what `work` draws, and add to `pack` what is known of it before the forward pass."""
        drawing = [(item, seq) for item, seq in zip(work, seqs, strict=True) if item.samples]
        asked = self._asked(drawing)
        if asked.has_grammar:
            return Asked(drawing, None)
        return Asked(drawing, RowDraws(_histories(drawing, asked), pack, asked=asked))

    def meets_peers(self, asked: Asked) -> bool:
        """Return whether `finish` of this step meets the peers."""
        return self._peers is not None and asked.is_bound and bool(asked.drawing)

    def launch(self, hidden: torch.Tensor, asked: Asked, step: StepIO) -> Launched:
        """Draw the next tokens, but for sequences whose masks are late.

        `hidden` (N, hidden_size) are the states of the last known token, and of the drafts behind it, of the sequences that draw,
        in their order."""
        if not asked.drawing:
            return Launched(asked, hidden.device)
        logits = self._model.logits(hidden)
        drawing, rows = asked.drawing, asked.rows
        if rows is None:
            drawing = self._ready(drawing) if self._owns_matchers else []
            if not drawing:
                return Launched(asked, hidden.device)
            logits, rows = self._masked(logits, asked.drawing, drawing, step)
        step.give(rows.draw(logits, self._model.ops, step))
        if (place := step.place()) is not None:
            _note_places(drawing, place)
        return Launched(asked, hidden.device, drawing, rows)

    def finish(self, launched: Launched, step: StepIO) -> tuple[Sampled, ...]:
        """Return what was drawn, and append it to the sequences. The step is over."""
        asked = launched.asked.drawing
        if not asked:
            return ()
        drawn: list[Sampled] = []
        if launched.rows is not None:
            keys = [item.key for item, _ in _by_row(launched.drawing)]
            self._dead_ends += launched.rows.dead_ends(keys)
            sampled = launched.rows.sampled(keys, step.read())
            drawn = verified([item for item, _ in launched.drawing], sampled)
        if self._peers is not None and launched.asked.is_bound:
            drawn = self._shared(self._peers, [item for item, _ in asked], drawn, launched.device)
        seqs = _drawers(asked, drawn)
        for one, seq in zip(drawn, seqs, strict=True):
            seq.append(one.token)
            for further in one.more:
                seq.append(further.token)
        if self._grammars is not None and launched.asked.is_bound:
            self._grammars.drawn({one.key: one.tokens for one in drawn})
        if not any(seq.reads_prompt for seq in seqs):
            return tuple(drawn)
        return tuple(with_prompt(one, seq, self._model.readout) for one, seq in zip(drawn, seqs, strict=True))

    def take_dead_ends(self) -> tuple[FailedSeq, ...]:
        """Return those of the sequences that `finish` was called with whose grammars allowed nothing, each once."""
        found, self._dead_ends = self._dead_ends, ()
        return found

    def draw(
        self, hidden: torch.Tensor, work: Sequence[SeqWork], seqs: Sequence[RankSeq]
    ) -> tuple[Sampled, ...]:
        """Launch and finish at once."""
        pack, step = Pack(), HostSteps(hidden.device).begin()
        asked = self.ask(work, seqs, pack)
        pack.send(step.upload)
        return self.finish(self.launch(hidden, asked, step), step)

    def _asked(self, drawing: Sequence[_Drawing]) -> RowsAsked:
        """What the rows of `drawing` ask for, worked out anew when other sequences draw."""
        samplings = [seq.sampling for _, seq in _by_row(drawing)]
        if self._rows_asked.samplings != samplings:
            self._rows_asked = RowsAsked(samplings)
        # The very objects: those of the next step are compared by identity then, and not field by field.
        self._rows_asked.samplings = samplings
        return self._rows_asked

    @property
    def _owns_matchers(self) -> bool:
        return self._peers is None or self._peers.owns_matchers

    def _ready(self, drawing: Sequence[_Drawing]) -> list[_Drawing]:
        """Return what can be drawn of `drawing`."""
        grammars, there = self._grammars, [(item, seq) for item, seq in drawing if _stands(item, seq)]
        if grammars is None:
            return there
        late = grammars.late(item.key for item, _ in drawing)
        return [(_cut(item, grammars.num_rows(item.key)), seq) for item, seq in there if item.key not in late]

    def _masked(
        self, logits: torch.Tensor, asked: Sequence[_Drawing], drawing: Sequence[_Drawing], step: StepIO
    ) -> tuple[torch.Tensor, RowDraws]:
        """Return the rows of `drawing`, a part of `asked`, and what they ask for with their masks."""
        pack = Pack()
        masks = (
            self._grammars.masks([item.key for item, _ in _by_row(drawing)])
            if self._grammars is not None
            else None
        )
        each = self._asked(drawing)
        rows = RowDraws(_histories(drawing, each), pack, masks, each)
        own = _rows_of(drawing, asked)
        ours = pack.add(np.array(own)) if len(own) < len(logits) else None
        pack.send(step.upload)
        return logits if ours is None else logits.index_select(0, ours()), rows

    def _shared(
        self, peers: Peers, work: Sequence[SeqWork], drawn: Sequence[Sampled], device: torch.device
    ) -> list[Sampled]:
        """Say what was drawn, or hear of it."""
        if peers.owns_matchers:
            peers.total(tokens_of(work, drawn).to(device))
            return [*drawn]
        nothing = torch.zeros(sum(item.num_draws for item in work), dtype=torch.int64, device=device)
        return _heard(work, peers.total(nothing))


def _drawers(asked: Sequence[_Drawing], drawn: Sequence[Sampled]) -> list[RankSeq]:
    """Return the sequences that have drawn, which are in the order of `asked`."""
    if len(drawn) == len(asked):
        return [seq for _, seq in asked]
    seq_of = {item.key: seq for item, seq in asked}
    return [seq_of[one.key] for one in drawn]


def _histories(drawing: Iterable[_Drawing], asked: RowsAsked) -> list[History]:
    """Return those of all rows; none where no draw depends on one."""
    if not asked.reads_history:
        return []
    return list(chain(*(histories(item, seq) for item, seq in drawing)))


def _by_row(drawing: Sequence[_Drawing]) -> Sequence[_Drawing]:
    """Return which each row belongs to."""
    if not any(item.drafts for item, _ in drawing):
        return drawing
    return [(item, seq) for item, seq in drawing for _ in range(item.num_draws)]


def _rows_of(drawing: Iterable[_Drawing], asked: Iterable[_Drawing]) -> list[int]:
    """Return which rows of `asked` belong to `drawing`, a part of it."""
    num_draws = {item.key: item.num_draws for item, _ in drawing}
    rows, first = list[int](), 0
    for item, _ in asked:
        rows += range(first, first + num_draws.get(item.key, 0))
        first += item.num_draws
    return rows


def _stands(item: SeqWork, seq: RankSeq) -> bool:
    """Return whether the token behind which it draws exists."""
    return item.known_end == seq.num_tokens or seq.place_of(item.known_end - 1) is not None


def _cut(item: SeqWork, num_rows: int | None) -> SeqWork:
    """Return it with at most so many rows: draft tokens behind which there is no mask are not verified."""
    surplus = item.num_draws - num_rows if num_rows is not None else 0
    if surplus <= 0:
        return item
    return replace(item, count=item.count - surplus, drafts=item.drafts[:-surplus])


def _note_places(drawing: Iterable[_Drawing], place: int) -> None:
    """Tell the sequences where the next step finds what they draw, but those with draft tokens. `place` is that of the first
    row."""
    for item, seq in drawing:
        if item.drafts:
            place += item.num_draws
        else:
            seq.drawn_at, seq.place = item.start + item.count, place
            place += 1


def tokens_of(work: Sequence[SeqWork], drawn: Sequence[Sampled]) -> torch.Tensor:
    """Return (N,) int64: for each work that draws a token for each row, or NOTHING. `by_work` reads them."""
    tokens_by_key = {one.key: one.tokens for one in drawn}
    out: list[int] = []
    for item in work:
        if item.samples:
            tokens = tokens_by_key.get(item.key, [])
            out += tokens + [NOTHING] * (item.num_draws - len(tokens))
    return torch.tensor(out, dtype=torch.int64)


def by_work(work: Iterable[SeqWork], tokens: torch.Tensor) -> list[list[int]]:
    """Return what each of `work`, all of which draw, has drawn, from what `tokens_of` gave."""
    rest = iter(tokens.tolist())
    return [[token for token in islice(rest, item.num_draws) if token != NOTHING] for item in work]


def _heard(work: Sequence[SeqWork], tokens: torch.Tensor) -> list[Sampled]:
    return [
        Sampled(item.key, drawn[0], more=tuple(Drawn(token) for token in drawn[1:]))
        for item, drawn in zip(work, by_work(work, tokens), strict=True)
        if drawn
    ]
