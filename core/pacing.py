"""How much of a prompt a step may compute beside sequences that decode, so that these get their tokens in time.

This lets any instance prefill, decode or do both. Without sequences that decode the whole step is for prompts, with loose targets
most of it, with tight ones little. The limits are a share of the tightest target, and what is left of each sequence's time. A
sequence that had to wait behind a long step gets shorter steps next, since a short output cannot make the time up later."""

from collections.abc import Sequence as Seq
from math import inf
from typing import Final

from core.ports import ServedSequence
from core.steps import StepModels

SHARE: Final = 0.8
"""The share of the tightest time per output token that a step may take. The rest is for errors of the step model."""
EASY_SHARE: Final = 0.5
"""The same share for steps whose prompts gain nothing by longer ones."""
GAINFUL: Final = 5.0
"""A step may be so many times as long as its decoding sequences and its own overhead take. Prompts in it are then computed at
five sixths of the full rate. Longer ones hardly compute more, while sequences that decode hold slots and blocks longer."""
CATCH_UP_SHARE: Final = 0.25
"""Each step makes up for this share of what a sequence is behind. With it outputs of five tokens are in time."""
CATCH_UP_GAIN: Final = 1.0
"""To catch up, steps are never made shorter than so many times a step's overhead, beside what decoding takes. So prompts continue
at half the full rate, also beside a sequence that is behind for good."""
PRESSING_SHARE: Final = 0.5
"""A prompt whose own work takes more than this share of its time to the first token gets steps of any length."""
MIN_TOKENS: Final = 64
"""Prompts continue with this many tokens even where decoding alone takes too long: waiting for it to end would hold them for
ever."""


def tokens_in_time(
    decoding: Seq[ServedSequence],
    context_tokens: int,
    prompts: Seq[ServedSequence],
    steps: StepModels,
    budget_tokens: int,
    starts_s: float,
) -> int:
    """Return the prompt tokens, at most `budget_tokens`, with which a step that begins at `starts_s` leaves all in time.

    `prompts` are in the order in which they get them; what the first has behind it is what their attention reads."""
    if not decoding:
        return budget_tokens
    tpot_s = min(seq.request.slo.tpot_s for seq in decoding)
    least_s = min(slack_s(seq, starts_s) for seq in decoding)
    start = prompts[0].num_computed if prompts else 0
    easy_share = SHARE if prompts and _is_pressing(prompts[0], steps) else EASY_SHARE
    return prompt_tokens(
        steps,
        len(decoding),
        context_tokens,
        tpot_s,
        budget_tokens=budget_tokens,
        start_tokens=start,
        easy_share=easy_share,
        slack_s=least_s,
    )


def slack_s(seq: ServedSequence, now: float) -> float:
    """Return how long a step that begins now may take, by how far the sequence is from where it should be."""
    share_s = SHARE * seq.request.slo.tpot_s
    if inf in (seq.first_token_s, share_s):
        return inf
    behind_s = now - seq.first_token_s - (seq.num_after_first - 1) * share_s
    return share_s - CATCH_UP_SHARE * behind_s


def _is_pressing(prompt: ServedSequence, steps: StepModels) -> bool:
    return steps.prompt.work_s(0, len(prompt.tokens)) > PRESSING_SHARE * prompt.request.slo.ttft_s


def prompt_tokens(
    steps: StepModels,
    num_decoding: int,
    context_tokens: float,
    tpot_s: float,
    *,
    budget_tokens: int,
    start_tokens: float = 0.0,
    easy_share: float = EASY_SHARE,
    slack_s: float = inf,
) -> int:
    """Return the prompt tokens from figures. Where no step with a prompt was seen yet there is no limit to derive."""
    model = steps.prompt
    if not model.num_steps or not model.token_s:
        return budget_tokens
    base_s = model.step_s(num_decoding, context_tokens + start_tokens, num_decoding + 1)
    longest_s = min(SHARE * tpot_s, max(easy_share * tpot_s, base_s + GAINFUL * model.fixed_s))
    longest_s = min(longest_s, max(slack_s, base_s + CATCH_UP_GAIN * model.fixed_s))
    tokens = (longest_s - base_s) / (model.token_s + model.pair_s * start_tokens)
    return max(min(MIN_TOKENS, budget_tokens), int(min(budget_tokens, tokens)))
