"""Entries that sum up windows of tokens (`models/spec/compressed_spec.py`), and a sequence's state between two steps.

An entry is a mean of its tokens' rows, weighed in each dimension by a softmax over the window. A window that is not complete is
kept as one row: the mean so far, and the logarithm of the weights' sum. Such a row joins others as a token's own would. Where
entries overlap each token has two rows: one for the entry of its own window, and one for that of the next.

A state is rows as long as an entry: means and weights of each series, those of the window before, and the last entry."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionMeta, Ops
from models.formats.weight_source import WeightSource
from models.layers.rope import halves_order, inverse_frequencies
from models.spec.compressed_spec import CompressedSpec
from models.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows that a step's tokens are in. A sequence's follow each other."""

    of_token: Tensor
    """(T,) int64"""
    place: Tensor
    """(T,) int64: of a token in its window."""
    numbers: Tensor
    """(W,) int64: of each window in its sequence."""
    firsts: Tensor
    """(B,) int64: the first window of each sequence."""
    lasts: Tensor
    is_complete: Tensor
    """(B,) bool: whether the last one is."""
    num_before: tuple[int, ...]
    """For each sequence how many windows were complete before the step."""
    complete: tuple[slice, ...]
    """The windows that the step has completed."""

    @classmethod
    def of(cls, starts: Sequence[int], lens: Sequence[int], rate: int, device: torch.device) -> "Windows":
        """Return those of sequences of which `lens` tokens from `starts` on are computed, at least one of each."""
        ends = [start + count for start, count in zip(starts, lens, strict=True)]
        before = [start // rate for start in starts]
        counts = [-(-end // rate) - first for end, first in zip(ends, before, strict=True)]
        edges = list(accumulate(counts, initial=0))
        positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        offset = np.repeat(np.array(edges[:-1]) - np.array(before), lens)

        def sent(values: Sequence[int] | np.ndarray) -> Tensor:
            return torch.as_tensor(np.asarray(values, np.int64)).to(device)

        return cls(
            of_token=sent(positions // rate + offset),
            place=sent(positions % rate),
            numbers=sent(
                np.concatenate(
                    [first + np.arange(count) for first, count in zip(before, counts, strict=True)]
                )
            ),
            firsts=sent(edges[:-1]),
            lasts=sent([edge - 1 for edge in edges[1:]]),
            is_complete=torch.tensor([end % rate == 0 for end in ends], device=device),
            num_before=tuple(before),
            complete=tuple(
                slice(edge, edge + end // rate - first)
                for edge, end, first in zip(edges, ends, before, strict=False)
            ),
        )

    @classmethod
    def of_step(cls, meta: AttentionMeta, rate: int) -> "Windows":
        """Return a step's, found once."""
        if (found := meta.cache.get(key := ("windows", rate))) is None:
            starts = starts_of(meta)
            found = meta.cache[key] = cls.of(starts, meta.query_lens, rate, meta.slots.device)
        return found


def starts_of(meta: AttentionMeta) -> list[int]:
    """Return how many tokens of each sequence were computed before the step."""
    return [context - query for query, context in zip(meta.query_lens, meta.context_lens, strict=True)]


@dataclass(frozen=True, slots=True)
class Entries:
    made: Tensor
    """(W, E): of each window that the step touches. Those of windows that are not complete mean nothing."""
    held: Tensor
    """(B, rows, E) float32: the states before the step."""
    windows: Windows

    def before(self, seq: int) -> Tensor:
        """(1, E): the last entry that was complete before the step."""
        return self.held[seq : seq + 1, -1].to(self.made.dtype)

    def pieces(self, size: int) -> Tensor:
        """(T, size): what lies behind each token of the entry before its window, zeros where there is nothing left of that."""
        shifted = self.made.roll(1, 0)
        shifted[self.windows.firsts] = self.held[:, -1].to(self.made.dtype)
        count = -(-shifted.shape[1] // size)
        padded = torch.nn.functional.pad(shifted, (0, (count + 1) * size - shifted.shape[1]))
        places = self.windows.place.clamp(max=count)
        return padded.unflatten(1, (count + 1, size))[self.windows.of_token, places]


@dataclass(frozen=True, slots=True)
class _Part:
    """An entry, or its index key, whose rotated pairs are put where `Ops.rope` rotates them."""

    prefix: str
    size: int
    rope_dim: int

    def rows(self, checkpoint: WeightSource, name: str, series: int, hidden: int) -> Tensor:
        """Return a projection (hidden, series, size)."""
        return self._split(checkpoint.take(f"{self.prefix}{name}", (series * self.size, hidden)).T, series)

    def bias(self, checkpoint: WeightSource, series: int, rate: int) -> Tensor:
        """Return what weights of each place in a window are increased by, (rate, series, size) float32."""
        shape = rate, series * self.size
        return self._split(checkpoint.take(f"{self.prefix}position_bias", shape, torch.float32), series)

    def norm(self, checkpoint: WeightSource) -> Tensor:
        """Return (size,) float32."""
        weight = checkpoint.take(f"{self.prefix}kv_norm.weight", (self.size,), torch.float32)
        return self._split(weight, 1)[0]

    def _split(self, x: Tensor, series: int) -> Tensor:
        order = halves_order(self.size - self.rope_dim, self.rope_dim)
        return x.unflatten(-1, (series, self.size))[..., order]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """(N, series, size) of each part -> (N, series * E), of which each series has all parts."""
    return torch.cat(list(parts), -1).flatten(-2)


class Compressor:
    """The weights of a layer by which tokens become entries, which are whole on every rank."""

    def __init__(
        self,
        spec: ModelSpec,
        kept: CompressedSpec,
        layer: int,
        checkpoint: WeightSource,
        prefix: str,
        ops: Ops,
    ) -> None:
        self.rate, self._size, self._series = (
            kept.rates[layer],
            kept.entry_size(layer),
            2 if kept.chooses[layer] else 1,
        )
        self._ops, self._eps, self._rope_dim = ops, spec.norm_eps, kept.rope_dim
        parts = [_Part(prefix, kept.head_dim, kept.rope_dim)]
        if kept.chooses[layer]:
            parts.append(_Part(f"{prefix}indexer.", kept.index.head_dim, kept.rope_dim))
        self._sizes = [part.size for part in parts]
        names = ("kv_proj.weight", "gate_proj.weight")
        rows = [
            _joined([part.rows(checkpoint, name, self._series, spec.hidden_size) for part in parts])
            for name in names
        ]
        self._rows = ops.pack(torch.cat(rows, 1).T.contiguous(), checkpoint.dtype)
        self._bias = _joined([part.bias(checkpoint, self._series, self.rate) for part in parts])
        self._norms = [part.norm(checkpoint) for part in parts]
        frequencies, self._factor = inverse_frequencies(
            spec.layer_ropes[layer], kept.rope_dim, spec.max_context_tokens
        )
        self._frequencies = frequencies.repeat(2).to(checkpoint.device)

    def rows(self, x: Tensor) -> Tensor:
        """(T, hidden) -> (T, 2 * series * E): what `entries` takes of each token."""
        return self._ops.linear(x, self._rows, None)

    def begun(self, held: Tensor, begins: Tensor) -> Tensor:
        """Return states (B, rows, E) with those of sequences that begin emptied."""
        return torch.where(begins[:, None, None], self._empty(held), held)

    def entries(self, rows: Tensor, held: Tensor, windows: Windows) -> tuple[Tensor, Tensor]:
        """Return the entry of each window (W, E), and the states behind the step."""
        series = self._series
        values, weights = rows.float().unflatten(1, (2, -1)).unbind(1)
        weights = weights + self._bias[windows.place]
        values, weights = (each.unflatten(1, (series, -1)) for each in (values, weights))
        shape = len(windows.numbers), self.rate + 1, series, self._size
        grid, logs = values.new_zeros(shape), values.new_full(shape, -torch.inf)
        at = windows.of_token, windows.place + 1
        grid[at], logs[at] = values, weights
        grid[windows.firsts, 0], logs[windows.firsts, 0] = held[:, :series], held[:, series : 2 * series]
        means, sums = (logs.softmax(1) * grid).sum(1), logs.logsumexp(1)
        own, more = torch.cat((means, sums), 1), list[Tensor]()
        pooled, empty = means[:, -1], self._empty(held)
        if series > 1:
            behind = torch.stack((means[:, 0], sums[:, 0]), 1)
            before = behind.roll(1, 0)
            before[windows.firsts] = held[:, 2 * series : -1]
            share = torch.stack((before[:, 1], sums[:, 1]), 1).softmax(1)
            pooled = share[:, 0] * before[:, 0] + share[:, 1] * means[:, 1]
            more = [self._latest(windows, behind, before)]
        made = self._finished(pooled, windows.numbers, rows.dtype)
        latest = windows.lasts - (~windows.is_complete).long()
        last = torch.where((latest >= windows.firsts)[:, None], made[latest].float(), held[:, -1])
        partial = self._latest(windows, empty[: 2 * series].expand_as(own), own)
        return made, torch.cat((partial, *more, last[:, None]), 1)

    def _latest(self, windows: Windows, complete: Tensor, other: Tensor) -> Tensor:
        """(W, .., E) each -> (B, .., E): of each sequence's last window, by whether it is complete."""
        last = windows.lasts
        return torch.where(windows.is_complete[:, None, None], complete[last], other[last])

    def _empty(self, like: Tensor) -> Tensor:
        """(rows, E): a state without a token. What has no weight has the logarithm of zero."""
        empty = like.new_zeros(like.shape[1:])
        empty[self._series : 2 * self._series] = -torch.inf
        if self._series > 1:
            empty[-2] = -torch.inf
        return empty

    def _finished(self, pooled: Tensor, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """(W, E) float32 -> the same, normalised and rotated by the position of the window's first token."""
        angles = (numbers * self.rate).float()[:, None] * self._frequencies
        cos, sin = ((turn(angles) * self._factor).to(dtype) for turn in (torch.cos, torch.sin))
        parts: list[Tensor] = []
        for part, norm in zip(pooled.to(dtype).split(self._sizes, 1), self._norms, strict=True):
            parts.append(
                rotated(self._ops, self._ops.rms_norm(part, norm, self._eps)[:, None], cos, sin)[:, 0]
            )
        return torch.cat(parts, 1)


def rotated(ops: Ops, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(T, heads, D) -> the same with the last dimensions rotated, as many as `cos` has."""
    kept = x.shape[-1] - cos.shape[-1]
    return torch.cat((x[..., :kept], ops.rope(x[..., kept:], cos, sin)), -1)
