"""What attention is asked for, as far as it decides whether an implementation can do it or is fast at it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.ops import AttentionMeta, KVLayer

StepKind = Literal["decode", "prefill"]
"""decode: every sequence has one token in the step. prefill: all other steps."""
Attend = Callable[[Tensor, KVLayer, AttentionMeta, float, int, float, Tensor | None], Tensor]
"""`Ops.paged_attention`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer's attention on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False

    @property
    def group(self) -> int:
        """The number of heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        return (
            f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, {str(self.dtype).removeprefix('torch.')}, "
            f"blocks of {self.block_size}, window {self.window}, cap {self.soft_cap:g}, sinks {int(self.sinks)}"
        )


@dataclass(frozen=True, slots=True)
class Backend:
    name: str
    attend: Attend
    cannot: Callable[[Case], str] = lambda case: ""
    """Return why it cannot do a case, as a clause about the case; empty where it can."""


def kind_of(meta: AttentionMeta) -> StepKind:
    if (kind := meta.cache.get("step kind")) is None:
        only_one = all(query_len == 1 for query_len in meta.query_lens)
        kind = meta.cache["step kind"] = "decode" if only_one else "prefill"
    return kind
