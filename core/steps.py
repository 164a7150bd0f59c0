"""How long an instance's steps take, as it has learned itself. It is enough to predict a step of any size."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """duration = fixed_s + token_s x new tokens + context_s x sum of contexts + seq_s x sequences + pair_s x pairs; none is < 0.

    Pairs: of a query with a key that it attends to, counted where a piece of a prompt is computed."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    context_s: float = 0.0
    """For each token of KV that is read."""
    seq_s: float = 0.0
    error: float = 0.0
    """Mean absolute error of recent predictions, each made before its step was seen, as a share of the duration."""
    num_steps: int = 0
    """Steps it was learned from; 0: nothing is known."""
    pair_s: float = 0.0

    def work_s(self, start_tokens: int, num_tokens: int) -> float:
        """Return how long so many tokens of a prompt that follow others take, beside the steps' own time."""
        return self.token_s * num_tokens + self.pair_s * chunk_pairs(start_tokens, num_tokens)

    def step_s(
        self, num_tokens: float, num_context_tokens: float, num_seqs: float, num_pairs: float = 0.0
    ) -> float:
        return (
            self.fixed_s
            + self.token_s * num_tokens
            + self.context_s * num_context_tokens
            + self.seq_s * num_seqs
            + self.pair_s * num_pairs
        )


@dataclass(frozen=True, slots=True)
class StepModels:
    """Two regimes, because devices have two: reading weights and KV is the limit of one, computing that of the other."""

    decode: StepModel = StepModel()
    """Steps in which every sequence computes one token; new tokens and sequences are the same number there."""
    prompt: StepModel = StepModel()
    """Steps with a piece of a prompt in them."""


def chunk_pairs(start: int, count: int) -> float:
    """Return the pairs of `count` tokens of a prompt that follow `start` others, causal."""
    return count * (start + (count + 1) / 2)


UNKNOWN_STEPS = StepModels()
