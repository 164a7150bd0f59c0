"""Where the ranks of an instance meet inside a forward pass. A model calls these and knows no ranks; alone they do nothing.

What a rank holds of a tensor decides which of them has work: a model calls all of them on every mesh."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.packed import LookUp

LocalExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x (N, hidden), slots (N, K) int64, weights (N, K) float32) -> (N, hidden): each row's weighted sum over its slots.

A slot is an index into the experts that this rank holds, in the order in which it holds them. -1 is no expert, and adds
nothing."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """Every rank of a group calls the same joins in the same order."""

    sum_partial: Callable[[Tensor], Tensor]
    """(T, hidden) of a product over a part of its inner dimension -> the sum over the parts. A bias is added behind it."""
    embed: Callable[[Tensor, LookUp, torch.dtype], Tensor]
    """(tokens (T,), this rank's rows of the embedding, dtype) -> (T, hidden) of that dtype"""
    gather_logits: Callable[[Tensor], Tensor]
    """(N, this rank's part of the vocabulary) -> (N, vocab_size)"""
    experts: Callable[[int, Tensor, Tensor, Tensor, LocalExperts], Tensor]
    """(layer, x (T, hidden), experts (T, K) int64, weights (T, K) float32, local) -> (T, hidden), complete.

    `layer` is the model's index; the experts are the router's, wherever they are held and however their matrices are cut."""
    share: Callable[[int], slice]
    """(size) -> the run of so many rows, columns or heads that this rank has where they are cut evenly"""


def _same(x: Tensor) -> Tensor:
    return x


def _all(size: int) -> slice:
    return slice(0, size)


def _embed(tokens: Tensor, rows: LookUp, dtype: torch.dtype) -> Tensor:
    return rows(tokens).to(dtype)


def _here(layer: int, x: Tensor, experts: Tensor, weights: Tensor, local: LocalExperts) -> Tensor:
    del layer
    return local(x, experts, weights)


ONE_RANK = Collectives(_same, _embed, _same, _here, _all)
