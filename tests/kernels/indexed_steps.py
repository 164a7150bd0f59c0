"""Steps over a pool of latents with index keys behind them, and what queries choose and hear of them by the definition."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.ops import AttentionMeta

Lens = Sequence[tuple[int, int]]
"""(query tokens, context tokens) of each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedStep:
    meta: AttentionMeta
    lens: Lens
    tables: Sequence[np.ndarray]
    pool: Tensor
    """(num_blocks, 1, 1, block_size, R + P + I)"""
    q: Tensor
    """(T, J, I) of the index."""
    weights: Tensor
    """(T, J) float32"""

    @classmethod
    def draw(
        cls, lens: Lens, *, heads: int = 5, size: int = 12, latent: int = 32, levels: int = 0, seed: int = 0,
        block_size: int = 4, device: torch.device | None = None,
    ) -> "IndexedStep":  # fmt: skip
        """`levels` > 0: whole numbers of so many values, so that scores are exact and often equal."""
        device = device or torch.device("cpu")
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-context // block_size) for _, context in lens]
        order = np.random.default_rng(seed).permutation(sum(counts) + 2).astype(np.int64)
        tables = [order[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(lens))]
        num_tokens = sum(query for query, _ in lens)

        def numbers(*shape: int) -> Tensor:
            if levels:
                return torch.randint(-levels, levels + 1, shape, generator=generator).float().to(device)
            return torch.randn(shape, generator=generator).to(device)

        meta = AttentionMeta.build(
            [q for q, _ in lens], [c for _, c in lens], tables, np.zeros(num_tokens, np.int64), device
        )
        pool = numbers(len(order), 1, 1, block_size, latent + size)
        q, weights = numbers(num_tokens, heads, size), numbers(num_tokens, heads)
        return cls(meta=meta, lens=lens, tables=tables, pool=pool, q=q, weights=weights)

    def slots(self, seq: int) -> Tensor:
        """Where the sequence's tokens lie."""
        size, context = self.pool.shape[3], self.lens[seq][1]
        return torch.tensor([int(self.tables[seq][at // size]) * size + at % size for at in range(context)])

    def chosen(self, top_k: int) -> Tensor:
        """(T, top_k) slots, one query after the other."""
        vectors, rows, row = self.pool.flatten(0, 3).cpu().double(), list[list[int]](), 0
        for seq, (query, context) in enumerate(self.lens):
            slots = self.slots(seq)
            keys = vectors[slots][:, -self.q.shape[2] :]
            for at in range(context - query, context):
                products = (self.q[row].cpu().double() @ keys[: at + 1].T).clamp(min=0)
                scores = (products * self.weights[row].cpu().double()[:, None]).sum(0).tolist()
                best = sorted(range(at + 1), key=lambda token: (-scores[token], token))[:top_k]
                rows.append([int(slots[token]) for token in sorted(best)])
                row += 1
        return torch.tensor(rows)
