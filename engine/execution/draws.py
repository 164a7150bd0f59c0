"""A step's tokens on one rank: drawn from its logits, or heard from the rank that draws for all that hold the same sequences.

A sequence whose mask is late draws nothing. The planner gives it its last token to compute again when the mask is made. What a
step planned meanwhile computes for it stands on a token that does not exist yet, so nothing is drawn from that either."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from core.plan import Sampled, SeqWork, StepPlan
from engine.execution.batch import RankSeq
from engine.execution.grammar_masks import GrammarMasks
from engine.execution.prompt_outputs import with_prompt
from engine.execution.sampler import sample
from models.causal_model import CausalModel

NOTHING = -1
"""In place of a token, where a sequence has drawn none."""


_Drawing = tuple[SeqWork, RankSeq]


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

        `hidden` (N, hidden_size) are the states of the last tokens of the N sequences that draw, in their order."""
        drawing = [(item, seq) for item, seq in zip(work, seqs, strict=True) if item.samples]
        if not drawing:
            return ()
        logits = self._model.logits(hidden)
        if all(seq.sampling.grammar is None for _, seq in drawing):
            drawn = self._sampled(logits, drawing, range(len(drawing)))
        elif self._peers.owns_matchers:
            drawn = self._sampled(logits, drawing, self._ready(drawing))
            self._peers.total(tokens_of(work, drawn).to(logits.device))
        else:
            nothing = torch.zeros(len(drawing), dtype=torch.int64, device=logits.device)
            drawn = _heard(drawing, self._peers.total(nothing))
        seq_of = {item.key: seq for item, seq in drawing}
        return tuple(self._appended(one, seq_of[one.key]) for one in drawn)

    def _ready(self, drawing: Sequence[_Drawing]) -> list[int]:
        """Return the rows that can be drawn."""
        late = self._grammars.late(item.key for item, _ in drawing) if self._grammars is not None else ()
        return [
            row
            for row, (item, seq) in enumerate(drawing)
            if item.start + item.count == seq.num_tokens and item.key not in late
        ]

    def _sampled(
        self, logits: torch.Tensor, drawing: Sequence[_Drawing], rows: Sequence[int]
    ) -> list[Sampled]:
        if not rows:
            return []
        keys, seqs = [drawing[row][0].key for row in rows], [drawing[row][1] for row in rows]
        masks = self._grammars.masks(keys) if self._grammars is not None else None
        part = logits if len(rows) == len(drawing) else logits[list(rows)]
        return sample(part, keys, seqs, self._model.ops, masks)

    def _appended(self, drawn: Sampled, seq: RankSeq) -> Sampled:
        drawn = with_prompt(drawn, seq, self._model.readout)
        seq.append(drawn.token)
        if self._grammars is not None:
            self._grammars.drawn(drawn.key, drawn.token)
        return drawn


def tokens_of(work: Sequence[SeqWork], drawn: Sequence[Sampled]) -> torch.Tensor:
    """Return (N,) int64: the token of each work that draws, or NOTHING."""
    token_of = {one.key: one.token for one in drawn}
    return torch.tensor([token_of.get(item.key, NOTHING) for item in work if item.samples])


def _heard(drawing: Sequence[_Drawing], tokens: torch.Tensor) -> list[Sampled]:
    return [
        Sampled(item.key, token)
        for (item, _), token in zip(drawing, tokens.tolist(), strict=True)
        if token != NOTHING
    ]
