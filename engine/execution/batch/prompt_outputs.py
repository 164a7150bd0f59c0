"""Reads what is wanted of a prompt's own tokens in the steps that compute them: how likely they are, or one vector of all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from core.plan import Sampled, SeqWork
from core.types import PromptScore
from engine.execution.batch.batch import RankSeq
from models.causal_model import CausalModel
from models.pooling.pooling import PoolingKind
from models.pooling.readout import Readout

_ROWS = 128
"""The number of rows of logits held at once. For a vocabulary of 150,000 they are 77 MB."""


def read_prompts(
    model: CausalModel, hidden: torch.Tensor, work: Sequence[SeqWork], seqs: Sequence[RankSeq]
) -> None:
    """Keep with each of `seqs` what it asks for. `hidden` (T, hidden_size) belongs to all packed tokens of `work`. Every rank of
    a tensor-parallel group calls this with the same work, since logits are gathered from all."""
    if not any(seq.reads_prompt for seq in seqs):
        return
    at = 0
    for item, seq in zip(work, seqs, strict=True):
        if seq.scores is not None:
            _score(model, hidden[at : at + item.count], seq, item.start)
        if seq.sampling.pooling:
            _pool(hidden[at : at + item.count], seq, item.start)
        at += item.count


def read_lens(work: Sequence[SeqWork], seqs: Sequence[RankSeq]) -> tuple[int, ...] | None:
    """Return of how many last tokens of each of `work` the hidden state is read, for samples or for what `seqs` ask of a prompt.
    None: of all."""
    if all(item.count == 1 and item.samples for item in work):
        return None
    return tuple(
        item.count
        if seq.scores is not None or seq.sampling.pooling
        else item.num_samples
        if item.samples
        else 0
        for item, seq in zip(work, seqs, strict=True)
    )


def with_prompt(sampled: Sampled, seq: RankSeq, readout: Readout) -> Sampled:
    """Return the first token of `seq` with what was kept of its prompt, which is given up."""
    scores, pooled = seq.scores, seq.pooled
    if not seq.reads_prompt or (scores is None and pooled is None):
        return sampled
    seq.scores = seq.pooled = None
    if pooled is not None and seq.sampling.pooling == "mean":
        pooled = pooled / seq.num_prompt
    embedding = b"" if pooled is None else vector_bytes(readout(pooled[None])[0].cpu())
    return replace(sampled, prompt_scores=tuple(scores or ()), embedding=embedding)


def pool(hidden: torch.Tensor, kind: PoolingKind | Literal[""]) -> torch.Tensor:
    """All of a text's hidden states (T, hidden_size) -> (hidden_size,) float32."""
    match kind:
        case "mean":
            return hidden.float().mean(0)
        case "cls":
            return hidden[0].float()
        case _:
            return hidden[-1].float()


def vector_bytes(vector: torch.Tensor) -> bytes:
    """As `TokenOut.embedding` has it."""
    return vector.numpy().astype("<f4").tobytes()


def _pool(hidden: torch.Tensor, seq: RankSeq, start: int) -> None:
    count = min(len(hidden), seq.num_prompt - start)
    if count <= 0:
        return
    if seq.sampling.pooling == "last":
        seq.pooled = hidden[count - 1].to(torch.float32, copy=True)
        return
    if seq.sampling.pooling == "cls":
        seq.pooled = hidden[0].to(torch.float32, copy=True) if start == 0 else seq.pooled
        return
    total = hidden[:count].float().sum(0)
    seq.pooled = total if seq.pooled is None else seq.pooled + total


def _score(model: CausalModel, hidden: torch.Tensor, seq: RankSeq, start: int) -> None:
    assert seq.scores is not None
    count = min(len(hidden), seq.num_prompt - 1 - start)
    for first in range(0, count, _ROWS):
        part = hidden[first : min(first + _ROWS, count)]
        seq.scores += _scores(model, part, seq, start + first)


def _scores(model: CausalModel, hidden: torch.Tensor, seq: RankSeq, start: int) -> list[PromptScore]:
    """Return the scores of the tokens behind each of `hidden`, the first of which is at `start`."""
    # The launch of a step that scores a prompt waits for the scores: few ask for them, and rows of logits are too large to keep.
    logits = model.logits(hidden).float()
    following = seq.tokens[start + 1 : start + 1 + len(hidden)]
    tokens = torch.from_numpy(following).to(logits.device)
    wanted = min(seq.sampling.num_prompt_logprobs, logits.shape[1])
    above = (logits > logits.gather(1, tokens[:, None])).sum(-1)
    found = model.ops.logprobs(logits, tokens, wanted)
    return [
        PromptScore(chosen, 1 + rank, tuple(zip(ids, values, strict=True)))
        for rank, chosen, values, ids in zip(above.tolist(), *(part.tolist() for part in found), strict=True)
    ]
