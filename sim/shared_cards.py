"""A card that a prefill and a decode instance share (ADR 046): what each has of it, and how long its steps take then.

An instance computes with its share of the processors, whatever the other one does; where the two shares are more than 1 together
and both run, they divide the card in proportion. Memory bandwidth is nobody's share: an instance reaches as much of it as its
processors do, and has what the other one's step does not ask for, but no less than in proportion to the processors. None of it
was measured."""

from dataclasses import dataclass
from math import ceil

from core.memory_law import GPU_RESERVE_BYTES
from sim.catalogue import MEMORY_SHARE, CatalogueModel, Gpu, step_cost
from sim.cost import SharedCost

SATURATING = 0.5
"""The share of a card's processors that reaches all of its memory bandwidth: an assumption."""
PREFILL_PROCESSORS = (0.3, 0.5, 0.7)
_PREFILL_KV_TOKENS = 16384
"""A prefill instance keeps prompts that are computed and those that leave: two full steps."""
_STEPS = 20
"""Shares of memory are multiples of one over this."""


@dataclass(frozen=True, slots=True)
class CardShare:
    memory: float
    """`gpu_share` of the configuration."""
    processors: float
    """`sm_share`."""


@dataclass(frozen=True, slots=True)
class CardShares:
    prefill: CardShare
    decode: CardShare

    @property
    def both_ways(self) -> tuple[tuple[CardShare, CardShare], tuple[CardShare, CardShare]]:
        """Return (own, the other's), of the prefill instance first."""
        return (self.prefill, self.decode), (self.decode, self.prefill)

    def __str__(self) -> str:
        parts = (("prefill", self.prefill), ("decode", self.decode))
        return " and ".join(
            f"{name} (gpu_share {one.memory:g}, sm_share {one.processors:g})" for name, one in parts
        )


def possible_shares(gpu: Gpu, model: CatalogueModel) -> list[CardShares]:
    """Return how a card may be shared: memory as prompts need it, the rest for decoding, and processors in several ways. Empty
    where it has no room for the weights twice."""
    needed = model.total_bytes + GPU_RESERVE_BYTES + _PREFILL_KV_TOKENS * model.kv_token_bytes
    prefill = ceil(_STEPS * needed / (MEMORY_SHARE * gpu.memory_bytes)) / _STEPS
    if prefill >= 1:
        return []
    return [
        CardShares(CardShare(prefill, share), CardShare(round(1 - prefill, 2), round(1 - share, 2)))
        for share in PREFILL_PROCESSORS
    ]


def shared_cost(gpu: Gpu, model: CatalogueModel, own: CardShare, other: CardShare) -> SharedCost:
    return SharedCost(
        whole=step_cost(gpu, model),
        processors=own.processors,
        others=other.processors,
        reach=min(1.0, own.processors / SATURATING),
    )
