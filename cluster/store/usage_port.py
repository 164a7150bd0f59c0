"""The seam to the ledger of usage: counts by minute and by day, of each tenant, key, model and class.

A writer's entries have numbers. What is added names the numbers that it covers, so that nothing is counted twice, whoever adds it
again after an answer was lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
Dimension = Literal["tenant", "key_id", "model", "slo_class", "batch"]


@dataclass(frozen=True, slots=True)
class UsedBy:
    """Whose usage. `start` is the minute, in seconds since 1970."""

    start: int
    tenant: str
    key_id: str
    model: str
    slo_class: str
    batch: bool


@dataclass(frozen=True, slots=True)
class UsageCounts:
    num_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    images: int = 0
    sequence_s: float = 0.0
    """From the first token to the last, of all sequences together."""

    def __add__(self, other: "UsageCounts") -> "UsageCounts":
        return UsageCounts(
            self.num_requests + other.num_requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.images + other.images,
            self.sequence_s + other.sequence_s,
        )


@dataclass(frozen=True, slots=True)
class UsageBatch:
    """All of a writer's entries with numbers from `first` up to but without `after`."""

    writer: str
    first: int
    after: int
    used: Mapping[UsedBy, UsageCounts]


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Usage from `begin` up to but without `end`, in buckets of `width_s`. `group_by`: what results tell apart. `only`: by
    dimension, the values of which there must be one."""

    begin: int
    end: int
    width_s: int
    group_by: tuple[Dimension, ...] = ()
    only: Mapping[Dimension, Sequence[str | bool]] | None = None


@dataclass(frozen=True, slots=True)
class UsageResult:
    start: int
    by: Mapping[str, str | bool]
    counts: UsageCounts


class UsageStore(Protocol):
    async def add_usage(self, batch: UsageBatch) -> int:
        """Add a batch unless its writer's entries are in up to another number than its first. Returns the number up to which they
        are in now."""
        ...

    async def usage_upto(self, writer: str) -> int:
        """Return the number up to which a writer's entries are in."""
        ...

    async def usage(self, query: UsageQuery) -> list[UsageResult]:
        """Return the usage of buckets that have any, in order."""
        ...
