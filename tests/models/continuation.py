"""What transformers would have said in place of an output, by one forward pass: `generate` takes one for each token."""

from collections.abc import Collection, Sequence
from typing import Any

import torch


@torch.inference_mode()
def continuation(
    reference: Any,
    prompt: Sequence[int],
    said: Sequence[int],
    count: int,
    *,
    ends: Collection[int] = (),
    barred: Collection[int] = (),
) -> list[int]:
    """Return the greedy continuation of `prompt` by `reference`, as far as `said` agrees with it, and its next token.

    It has at most `count` tokens, none of `barred`, and stops behind one of `ends`. So it equals `said` where `said` is the
    greedy continuation, and differs from it in the first place where it is not, also where `said` is too short or too long.
    """
    rows = reference(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 :].clone()
    rows[:, list(barred)] = -torch.inf
    found: list[int] = []
    for token, own in zip(rows.argmax(-1).tolist()[:count], [*said, None], strict=False):
        found.append(token)
        if token in ends or token != own:
            break
    return found
