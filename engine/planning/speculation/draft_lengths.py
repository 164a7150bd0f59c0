"""How many draft tokens of each sequence a step computes: as many as make it produce more tokens a second.

A step without draft tokens samples one token for each sequence. A draft token adds the chance that it is right, and costs what
the step-time model says of one more token. So the best ones are added as long as each adds more than its time would have sampled
otherwise: where a device is busy with its sequences' own tokens nothing is added (Liu et al., "TurboSpec", 2024).

A draft model computes draft tokens one behind the other, each for all sequences together. So its time goes by the longest draft,
and the best length of that is looked for."""

from collections.abc import Sequence as SeqOf

WORTH = 1.05
"""Draft tokens must produce so many times the tokens a second: such steps are not planned ahead, and the step-time model is not
exact."""


def draft_lengths(
    chances: SeqOf[SeqOf[float]],
    num_seqs: int,
    step_s: float,
    token_s: float,
    limit: int,
    proposing_s: float = 0.0,
) -> list[int]:
    """Return for each draft how many of its tokens to compute, at most `limit` in all. `chances[i]` are those of its tokens, in
    falling order. `step_s` says how long the step of `num_seqs` sequences takes without draft tokens. Where that is 0 it is not
    known, and draft tokens are taken to cost nothing. `proposing_s` is how long a draft model takes to make them."""
    ranked = sorted(
        (-chance, at, which) for which, each in enumerate(chances) for at, chance in enumerate(each)
    )
    lengths = [0] * len(chances)
    tokens, took_s = float(num_seqs), step_s + proposing_s if step_s else 0.0
    for falling, _, which in ranked[: max(0, limit)]:
        if -falling * took_s <= tokens * token_s and step_s:
            break
        tokens -= falling
        took_s += token_s
        lengths[which] += 1
    is_worth = tokens * step_s >= WORTH * num_seqs * took_s
    return lengths if is_worth else [0] * len(chances)


def longest_proposal(
    chances: SeqOf[SeqOf[float]],
    num_seqs: int,
    step_s: float,
    token_s: float,
    limit: int,
    each_s: float,
) -> int:
    """Return how many tokens of each sequence a draft model is to propose at most, which takes `each_s` for one more of all. The
    others are as in `draft_lengths`."""
    best, best_pace = 0, num_seqs / step_s if step_s else 0.0
    longest = max(map(len, chances), default=0)
    if not step_s:
        return longest
    if not each_s:
        return min(1, longest)  # nobody knows what more would take
    for most in range(1, longest + 1):
        cut = [each[:most] for each in chances]
        lengths = draft_lengths(cut, num_seqs, step_s, token_s, limit, most * each_s)
        tokens = num_seqs + sum(sum(each[:length]) for each, length in zip(cut, lengths, strict=True))
        pace = tokens / (step_s + most * each_s + token_s * sum(lengths))
        if pace > best_pace:
            best, best_pace = most, pace
    return best
