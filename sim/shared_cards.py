"""A card that a prefill and a decode instance share (ADR 046): what each has of it, and how long its steps take then.

Measured on one H200 with 8B, bfloat16, and bounds of 0.6 of the processors for prompts and 0.4 for tokens
(`benchmarks/results/gpu.md`): a prompt of 2,048 tokens takes 1.44 of its time with the whole card, a step of 64 sequences 1.36,
and beside each other they take 1.29 and 1.33 of that. The constants of `sim.catalogue.cost.SharedCost` are chosen so that
modelled steps do, too. Other shares go in proportion, and other cards are taken to be alike: neither was measured."""

from dataclasses import dataclass
from math import ceil

from core.cost.memory_model import GPU_RESERVE_BYTES
from sim.catalogue.catalogue import MEMORY_SHARE, CatalogueModel, Gpu, step_cost
from sim.catalogue.cost import SharedCost

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
    return SharedCost(whole=step_cost(gpu, model), processors=own.processors, others=other.processors)
