"""Beam search: of all continuations of the beams, the likeliest go on. Scores and stopping rules are those of transformers'
`generate(num_beams=...)` (`GenerationMixin._beam_search`). Pure: likelihoods in, decisions out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from core.types import TokenId

Likeliest = Sequence[tuple[TokenId, float]]
"""Tokens that may follow a beam and their log-probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    width: int
    """How many beams go on, and how many finished ones are kept."""
    length_penalty: float = 1.0
    """A finished beam's score is its log-probability by its length to this power: more than 0 favours longer ones."""
    early_stopping: bool | Literal["never"] = False
    """True: stop as soon as `width` beams have finished. False: stop once the best running beam, if it finished now, would score
    less than all of these. "never": stop once it could not score more at any length."""


@dataclass(frozen=True, slots=True)
class Beam:
    tokens: tuple[TokenId, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Each token's."""
    likeliest: tuple[Likeliest, ...] = ()
    """What might have followed in the place of each token."""
    logprob: float = 0.0
    """The sum over all tokens."""


class BeamSearch:
    """Give `advance` what may follow each of `running` until `is_over`."""

    def __init__(self, params: BeamParams, ends: frozenset[TokenId], max_tokens: int) -> None:
        """`ends`: tokens that finish a beam. A beam of `max_tokens` (at least one) finishes as well."""
        self._params, self._ends, self._max_tokens = params, ends, max_tokens
        self.running = [Beam()]
        """The beams that go on, likeliest first."""
        self._finished: list[tuple[float, Beam]] = []
        self.is_over = False

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest tokens of each beam `advance` needs: enough that `width` go on where others finish."""
        return max(2, 1 + len(self._ends)) * self._params.width

    def best(self, count: int) -> list[Beam]:
        """The finished beams with the highest scores, highest first."""
        return [beam for _, beam in self._finished[:count]]

    def advance(self, likeliest: Sequence[Likeliest]) -> None:
        """Lengthen the beams by a token. `likeliest` has a list for each of `running`, in that order."""
        candidates = [
            (beam.logprob + logprob, beam, tokens, token, logprob)
            for beam, tokens in zip(self.running, likeliest, strict=True)
            for token, logprob in tokens
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        self.running = []
        for rank, (total, before, tokens, token, logprob) in enumerate(candidates[: self.num_candidates]):
            beam = Beam(
                (*before.tokens, token),
                (*before.logprobs, logprob),
                (*before.likeliest, tokens),
                total,
            )
            if token in self._ends or len(beam.tokens) >= self._max_tokens:
                if rank < self._params.width:
                    self._finished.append((self._score(beam, len(beam.tokens)), beam))
            elif len(self.running) < self._params.width:
                self.running.append(beam)
        self._finished.sort(key=lambda scored: -scored[0])
        del self._finished[self._params.width :]
        self.is_over = not self.running or not self._may_improve()

    def _may_improve(self) -> bool:
        """Return whether a running beam may still be one of the best."""
        if len(self._finished) < self._params.width:
            return True
        early, best = self._params.early_stopping, self.running[0]
        if early is True:
            return False
        longest = early == "never" and self._params.length_penalty > 0
        return self._score(best, self._max_tokens if longest else len(best.tokens)) > self._finished[-1][0]

    def _score(self, beam: Beam, length: int) -> float:
        return beam.logprob / length**self._params.length_penalty
