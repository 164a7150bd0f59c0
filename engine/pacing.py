"""How much of a prompt a step may compute beside sequences that decode, so that these get their tokens in time. Pure.

This is what lets any instance prefill, decode or do both: without sequences that decode the whole step is for prompts, with loose
targets most of it, with tight ones little."""

from collections.abc import Sequence as Seq

from core.steps import StepModels
from engine.sequence import Sequence

SHARE = 0.95
"""Of the tightest time per output token; the rest is for what the model gets wrong."""
MIN_TOKENS = 64
"""Prompts go on even where decoding alone takes too long: waiting for it to end would hold them for ever."""


def tokens_in_time(
    decoding: Seq[Sequence], context_tokens: int, steps: StepModels, budget_tokens: int
) -> int:
    """Prompt tokens, at most `budget_tokens`, with which the step still takes no longer than the tightest target."""
    if not decoding:
        return budget_tokens
    tpot_s = min(seq.request.slo.tpot_s for seq in decoding)
    return prompt_tokens(steps, len(decoding), context_tokens, tpot_s, budget_tokens)


def prompt_tokens(
    steps: StepModels, num_decoding: int, context_tokens: float, tpot_s: float, budget_tokens: int
) -> int:
    """The same from figures. Where no step with a prompt was seen yet there is nothing to go by."""
    model = steps.prompt
    if not model.num_steps or not model.token_s:
        return budget_tokens
    base_s = model.step_s(num_decoding, context_tokens, num_decoding + 1)
    tokens = (SHARE * tpot_s - base_s) / model.token_s
    return max(min(MIN_TOKENS, budget_tokens), min(budget_tokens, int(tokens)))
