"""The end of reasoning that has spent its budget.

Invariant: what is forced depends on the budget and the output tokens alone, so it is the same after a hand-over or a retry."""

import numpy as np

from core.types import ThinkingBudget, TokenId

_MAX_TOKENS_BEFORE = 4
"""White space that a model may write before it opens its reasoning."""


def forced_token(budget: ThinkingBudget, output: np.ndarray) -> TokenId | None:
    """Return the token that must follow `output` (N,) int64, or None where the model chooses."""
    start = 0
    if budget.begin:
        at = _find(output[: _MAX_TOKENS_BEFORE + len(budget.begin)], budget.begin)
        if at is None:
            return None
        start = at + len(budget.begin)
    num_beyond = len(output) - start - budget.max_tokens
    if not 0 <= num_beyond < len(budget.forced):
        return None
    if _find(output[start : start + budget.max_tokens], budget.end) is not None:
        return None
    return budget.forced[num_beyond]


def _find(tokens: np.ndarray, part: tuple[TokenId, ...]) -> int | None:
    """Return where `part` first begins in `tokens`."""
    for at in np.flatnonzero(tokens[: max(0, len(tokens) - len(part) + 1)] == part[0]).tolist():
        if tuple(tokens[at : at + len(part)].tolist()) == part:
            return at
    return None
