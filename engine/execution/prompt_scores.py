"""How likely a model finds the tokens of a prompt, from the hidden states of the steps that compute it."""

from collections.abc import Sequence

import torch

from core.plan import SeqWork
from core.types import PromptScore
from engine.execution.batch import RankSeq
from models.model import Model

_ROWS = 128
"""Logits held at once: of a vocabulary of 150,000 this many rows are 77 MB."""


def score_prompts(
    model: Model, hidden: torch.Tensor, work: Sequence[SeqWork], seqs: Sequence[RankSeq]
) -> None:
    """Adds to the scores of those of `seqs` that have any. `hidden` (T, hidden_size): of all tokens of `work`, packed.

    Every rank of a tensor-parallel group calls this with the same work: the logits are gathered from all."""
    at = 0
    for item, seq in zip(work, seqs, strict=True):
        if seq.scores is not None:
            count = min(item.count, seq.num_prompt - 1 - item.start)
            for first in range(0, count, _ROWS):
                num = min(_ROWS, count - first)
                start = item.start + first
                seq.scores += _scores(model, hidden[at + first : at + first + num], seq, start)
        at += item.count


def _scores(model: Model, hidden: torch.Tensor, seq: RankSeq, start: int) -> list[PromptScore]:
    """For the tokens behind each of `hidden`, the first of which is at `start`."""
    logits = model.logits(hidden)
    following = seq.tokens[start + 1 : start + 1 + len(hidden)]
    tokens = torch.from_numpy(following).to(logits.device)
    wanted = min(seq.sampling.num_prompt_logprobs, logits.shape[1])
    above = (logits > logits.gather(1, tokens[:, None])).sum(-1)
    found = model.ops.logprobs(logits, tokens, wanted)
    return [
        PromptScore(chosen, 1 + rank, tuple(zip(ids, values, strict=True)))
        for rank, chosen, values, ids in zip(above.tolist(), *(part.tolist() for part in found), strict=True)
    ]
