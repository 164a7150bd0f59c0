"""How requests shape the logits of their rows, beside grammars: worked out on the host, applied to all rows at once."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.types import SamplingParams, TokenId
from engine.execution.batch.batch import History
from engine.execution.batch.step_memory import Pack, Placed, StepIO
from engine.execution.sampling.thinking_budget import forced_token
from kernels.sampling import Penalties

_Entry = tuple[int, TokenId]
"""(row, token)"""


class RowsAsked:
    """What the rows of a batch ask for by their parameters alone. It holds for as long as the same sequences sample."""

    def __init__(self, samplings: list[SamplingParams]) -> None:
        rows = range(len(samplings))
        self.samplings = samplings
        self.logprobs = [row for row in rows if samplings[row].num_logprobs >= 0]
        self.shaped = [row for row in rows if _is_shaped(samplings[row])]
        self.thinking = [row for row in rows if samplings[row].thinking is not None]
        self.penalised = [row for row in rows if _is_penalised(samplings[row])]
        self.random = [row for row in rows if samplings[row].temperature > 0]
        """The rows that are not greedy."""
        self.reads_history = bool(self.shaped or self.thinking or self.penalised or self.random)
        """Whether any sample depends on more than its logits."""
        self.only_likeliest = not (self.reads_history or self.logprobs)
        """Whether all rows ask for their likeliest token and for nothing else."""
        self.has_grammar = any(each.grammar is not None for each in samplings)
        columns = [(each.temperature, each.top_k, each.top_p, each.min_p, 0.0) for each in samplings]
        self.columns: np.ndarray = np.array(columns, np.float64).reshape(-1, 5).T.copy()
        """As `SampleShapes.columns`, with 0 for each number in [0, 1)."""


class Shaping:
    """Bias, allowed and banned tokens, the minimum length, and the end of reasoning that has spent its budget."""

    def __init__(
        self, seqs: Sequence[History], asked: RowsAsked, pack: Pack, complete: Collection[int]
    ) -> None:
        """Call the rest when `pack` is sent. An output that its grammar has `complete`d may end before its minimum length."""
        shaped = [(row, seqs[row]) for row in asked.shaped]
        biases = [(row, *bias) for row, seq in shaped for bias in seq.sampling.logit_bias]
        self._bias = _entries(((row, token) for row, token, _ in biases), pack)
        self._added = pack.add(np.array([each for *_, each in biases], np.float32)) if biases else None
        bound = [
            (row, seq.sampling.allowed_token_ids) for row, seq in shaped if seq.sampling.allowed_token_ids
        ]
        self._bound_rows = pack.add(np.array([row for row, _ in bound])) if bound else None
        self._allowed = _entries(((row, token) for row, tokens in bound for token in tokens), pack)
        self._banned = _entries(
            ((row, token) for row, seq in shaped for token in _banned(seq, may_end=row in complete)), pack
        )
        forced = [*_forced(seqs, asked.thinking)]
        self.forced_rows = frozenset(row for row, _ in forced)
        """The rows in which one token is all that may be sampled, whatever a grammar says."""
        self._forced = _entries(forced, pack)

    def shape(self, logits: Tensor) -> None:
        """Apply it all to (N, V) float32, in place."""
        if self._bias is not None and self._added is not None:
            logits.index_put_(tuple(self._bias().unbind(0)), self._added(), accumulate=True)
        if self._bound_rows is not None and self._allowed is not None:
            allowed = tuple(self._allowed().unbind(0))
            kept = logits[allowed]
            logits.index_fill_(0, self._bound_rows(), -torch.inf)
            logits.index_put_(allowed, kept)
        if self._banned is not None:
            _set(logits, self._banned(), -torch.inf)
        if self._forced is not None:
            entries = self._forced()
            logits.index_fill_(0, entries[0], -torch.inf)
            _set(logits, entries, 0.0)


@dataclass(frozen=True, slots=True)
class Penalising:
    """The penalties of a batch in which some row has any."""

    entries: Placed
    factors: Placed
    late: tuple[Placed, Placed] | None
    """The rows whose last token only the device knows, and where it is there."""

    @classmethod
    def of(cls, seqs: Sequence[History], asked: RowsAsked, pack: Pack) -> "Penalising | None":
        if not asked.penalised:
            return None
        found = [_history(row, seqs[row]) for row in asked.penalised]
        late = [(row, place) for row in asked.penalised if (place := seqs[row].last_place) is not None]
        factors = [
            (s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
            for s in (seq.sampling for seq in seqs)
        ]
        return cls(
            pack.add(np.concatenate(found, 1)),
            pack.add(np.array(factors, np.float32).T.copy()),
            (pack.add(np.array([row for row, _ in late])), pack.add(np.array([place for _, place in late])))
            if late
            else None,
        )

    def penalties(self, step: StepIO) -> Penalties:
        entries, factors = self.entries(), self.factors()
        if self.late is not None:
            rows, places = self.late
            entries = _with_last(entries, factors.shape[1], rows(), step.known(places()))
        return Penalties(entries, factors)


def _is_shaped(sampling: SamplingParams) -> bool:
    return bool(
        sampling.logit_bias or sampling.min_tokens or sampling.allowed_token_ids or sampling.bad_words
    )


def _is_penalised(sampling: SamplingParams) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def _entries(entries: Iterable[_Entry], pack: Pack) -> Placed | None:
    found = [*entries]
    return pack.add(np.array(found, np.int64).T.copy()) if found else None


def _set(logits: Tensor, entries: Tensor, value: float) -> None:
    # From the device's own memory: a number of the host's would be copied there, and waited for.
    values = torch.full((1,), value, dtype=logits.dtype, device=logits.device)
    logits.index_put_(tuple(entries.unbind(0)), values)


def _banned(seq: History, *, may_end: bool) -> Iterable[TokenId]:
    """Yield the tokens that would complete a bad word, or end the output before its minimum length."""
    sampling, known = seq.sampling, seq.tokens[: seq.num_tokens]
    for word in sampling.bad_words:
        if len(word) == 1 or (
            len(word) <= len(known) + 1 and tuple(known[1 - len(word) :].tolist()) == word[:-1]
        ):
            yield word[-1]
    if seq.num_tokens - seq.num_prompt < sampling.min_tokens and not may_end:
        yield from sampling.masked_until_min


def _forced(seqs: Sequence[History], thinking: Iterable[int]) -> Iterable[_Entry]:
    for row in thinking:
        seq = seqs[row]
        if (budget := seq.sampling.thinking) is not None:
            token = forced_token(budget, seq.tokens[seq.num_prompt : seq.num_tokens])
            if token is not None:
                yield row, token


def _history(row: int, seq: History) -> np.ndarray:
    """Return the row's part of `Penalties.entries`, as far as the host knows its tokens."""
    end = seq.num_tokens - (seq.last_place is not None)
    known, output = seq.tokens[:end], seq.tokens[seq.num_prompt : end]
    tokens = np.unique(known if seq.sampling.repetition_penalty != 1.0 else output)
    said, counts = np.unique(output, return_counts=True)
    in_output = np.zeros(len(tokens), np.int64)
    in_output[np.searchsorted(tokens, said)] = counts
    return np.stack((np.full(len(tokens), row), tokens, in_output))


def _with_last(entries: Tensor, num_rows: int, rows: Tensor, tokens: Tensor) -> Tensor:
    """Return entries that count one more token in each of `rows`, which may be among those of the row already."""
    last = tokens.new_full((num_rows,), -1).index_copy_(0, rows, tokens)
    again = (entries[1] == last[entries[0]]).long()
    num_again = torch.zeros_like(last).index_add_(0, entries[0], again)
    new = torch.stack((torch.where(num_again[rows] > 0, -1, rows), tokens, torch.ones_like(rows)))
    return torch.cat((torch.cat((entries[:2], (entries[2] + again)[None])), new), 1)
