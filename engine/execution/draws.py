"""A step's tokens on one rank: drawn from its logits, or heard from the rank that draws for all that hold the same sequences.

A sequence whose mask is late draws nothing. The planner gives it its last token to compute again when the mask is made. What a
step planned meanwhile computes for it stands on a token that does not exist yet, so nothing is drawn from that either."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch

from core.plan import Drawn, Sampled, SeqWork, StepPlan
from engine.execution.batch import RankSeq
from engine.execution.grammar_masks import GrammarMasks
from engine.execution.prompt_outputs import with_prompt
from engine.execution.sampler import sample
from engine.execution.verifying import histories, verified
from models.causal_model import CausalModel

NOTHING = -1
"""In place of a token, where a sequence has drawn none."""


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A sequence that draws."""

    item: SeqWork
    seq: RankSeq
    rows: range
    """Its rows of the logits."""

    def cut(self, num_rows: int | None) -> "_Drawing":
        """Return it with at most so many rows: guesses behind which there is no mask are not verified."""
        surplus = len(self.rows) - num_rows if num_rows is not None else 0
        if surplus <= 0:
            return self
        item = self.item
        fewer = replace(item, count=item.count - surplus, drafts=item.drafts[:-surplus])
        return _Drawing(fewer, self.seq, self.rows[:-surplus])


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that hold the same sequences and have the same logits. One of them owns the matchers: in a step in which a
    sequence with a grammar draws, the others hear from it what each has drawn."""

    owns_matchers: bool = True
    total: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    """The sum over all of them, in place."""


class Draws:
    def __init__(
        self, model: CausalModel, grammars: GrammarMasks | None = None, peers: Peers = Peers()
    ) -> None:
        """`grammars` is None on ranks that do not own the matchers, and where no sequence can have a grammar."""
        self._model, self._grammars, self._peers = model, grammars, peers

    def begin(self, plan: StepPlan) -> None:
        """Before the forward pass."""
        if self._grammars is not None:
            self._grammars.begin(plan)

    def draw(
        self, hidden: torch.Tensor, work: Sequence[SeqWork], seqs: Sequence[RankSeq]
    ) -> tuple[Sampled, ...]:
        """Draw the next tokens of `work`, but for sequences whose masks are late, and append them to `seqs`.

        `hidden` (N, hidden_size) are the states of the last known token, and of the drafts behind it, of the sequences that draw,
        in their order."""
        drawing = _drawing(work, seqs)
        if not drawing:
            return ()
        logits = self._model.logits(hidden)
        if all(one.seq.sampling.grammar is None for one in drawing):
            drawn = self._sampled(logits, drawing)
        elif self._peers.owns_matchers:
            drawn = self._sampled(logits, self._ready(drawing))
            self._peers.total(tokens_of(work, drawn).to(logits.device))
        else:
            nothing = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
            drawn = _heard(drawing, self._peers.total(nothing))
        seq_of = {one.item.key: one.seq for one in drawing}
        return tuple(self._appended(one, seq_of[one.key]) for one in drawn)

    def _ready(self, drawing: Sequence[_Drawing]) -> list[_Drawing]:
        """Return what can be drawn of `drawing`."""
        grammars = self._grammars
        if grammars is None:
            return [one for one in drawing if one.item.known_end == one.seq.num_tokens]
        late = grammars.late(one.item.key for one in drawing)
        return [
            one.cut(grammars.num_rows(one.item.key))
            for one in drawing
            if one.item.known_end == one.seq.num_tokens and one.item.key not in late
        ]

    def _sampled(self, logits: torch.Tensor, drawing: Sequence[_Drawing]) -> list[Sampled]:
        if not drawing:
            return []
        work = [one.item for one in drawing]
        keys = [item.key for item in work for _ in range(item.num_draws)]
        seqs = list(chain(*(histories(one.item, one.seq) for one in drawing)))
        masks = self._grammars.masks(keys) if self._grammars is not None else None
        rows = [row for one in drawing for row in one.rows]
        part = logits if len(rows) == len(logits) else logits[rows]
        return verified(work, sample(part, keys, seqs, self._model.ops, masks))

    def _appended(self, drawn: Sampled, seq: RankSeq) -> Sampled:
        drawn = with_prompt(drawn, seq, self._model.readout)
        tokens = [one.token for one in drawn.drawn]
        for token in tokens:
            seq.append(token)
        if self._grammars is not None:
            self._grammars.drawn(drawn.key, tokens)
        return drawn


def _drawing(work: Sequence[SeqWork], seqs: Sequence[RankSeq]) -> list[_Drawing]:
    out: list[_Drawing] = []
    row = 0
    for item, seq in zip(work, seqs, strict=True):
        if item.samples:
            out.append(_Drawing(item, seq, range(row, row + item.num_draws)))
            row += item.num_draws
    return out


def tokens_of(work: Sequence[SeqWork], drawn: Sequence[Sampled]) -> torch.Tensor:
    """Return (N,) int64: for each work that draws a token for each row, or NOTHING. `by_work` reads them."""
    tokens_by_key = {one.key: [each.token for each in one.drawn] for one in drawn}
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


def _heard(drawing: Sequence[_Drawing], tokens: torch.Tensor) -> list[Sampled]:
    work = [one.item for one in drawing]
    return [
        Sampled(item.key, drawn[0], more=tuple(Drawn(token) for token in drawn[1:]))
        for item, drawn in zip(work, by_work(work, tokens), strict=True)
        if drawn
    ]
