"""What somebody may ask of the cluster, and what a request needs of that.

A request is counted when it comes. Its prompt is paid for when it begins, together with what its output is likely to take. Output
beyond that is paid for as it is delivered, so a limit may be exceeded by what is running; nothing new begins meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from cluster.store.usage_port import Dimension
from core.config.live_config import LimitsConfig
from core.limit_messages import Limit

_FIRST_OUTPUT = 256.0
"""What an output is taken to have before the first has ended."""
_LATEST = 0.1
"""What the latest output counts in the mean."""


@dataclass(frozen=True, slots=True)
class UseLimits:
    """0 means that there is no limit."""

    requests_per_min: int = 0
    tokens_per_min: int = 0
    concurrent: int = 0
    tokens_per_day: int = 0
    tokens_per_month: int = 0


@dataclass(frozen=True, slots=True)
class Limited:
    """Limits of somebody: a tenant, a key, a model, or a tenant with a model."""

    whose: str
    limits: UseLimits
    dimensions: Mapping[Dimension, str] = field(default_factory=dict[Dimension, str])
    """Whose usage counts for the budgets."""

    @property
    def requests(self) -> tuple[Limit, ...]:
        """Return the limit of this, if there is one."""
        most = self.limits.requests_per_min
        return (Limit(self.whose, "requests", most),) if most else ()

    @property
    def tokens(self) -> tuple[Limit, ...]:
        most = self.limits.tokens_per_min
        return (Limit(self.whose, "tokens", most),) if most else ()

    @property
    def sequences(self) -> tuple[Limit, ...]:
        most = self.limits.concurrent
        return (Limit(self.whose, "sequences", most),) if most else ()


def limits_of(config: LimitsConfig) -> UseLimits:
    return UseLimits(
        config.max_requests_per_min,
        config.max_tokens_per_min,
        config.max_concurrent,
        config.max_tokens_per_day,
        config.max_tokens_per_month,
    )


@dataclass(frozen=True, slots=True)
class Need:
    """What a request takes of a limit. At least `least` must be there: one that takes nothing may still not begin in debt."""

    limit: Limit
    amount: int
    least: int = 0


@dataclass(frozen=True, slots=True)
class Excess:
    """Why something may not begin now, and when it may; `retry_after_s` is infinite for what never fits. `limit` is None where no
    scheduler says what is left."""

    limit: Limit | None
    retry_after_s: float

    @property
    def reason(self) -> str:
        if self.limit is None:
            return "no scheduler says how much is left"
        how = "at once" if self.limit.what == "sequences" else "per minute"
        return f"{self.limit.whose} may have {self.limit.most} {self.limit.what} {how}, at all ingresses together"


def needs_to_begin(
    limited: Sequence[Limited], num_sequences: int, num_prompt_tokens: int, num_output_tokens: int
) -> list[Need]:
    """Return what sequences need of these limits. A limit is asked for more than it has by the prompt alone."""
    needs: list[Need] = []
    for one in limited:
        needs += [Need(limit, num_sequences) for limit in one.sequences if num_sequences]
        for limit in one.tokens:
            room = max(0, limit.most - num_prompt_tokens)
            needs.append(Need(limit, num_prompt_tokens + min(num_output_tokens, room), least=1))
    return needs


class LikelyOutput:
    """How many tokens an output is likely to have: the mean of the latest ones."""

    def __init__(self) -> None:
        self._mean = _FIRST_OUTPUT

    def of(self, max_tokens: int) -> int:
        return min(max_tokens, ceil(self._mean))

    def ended(self, num_tokens: float) -> None:
        self._mean += _LATEST * (num_tokens - self._mean)


def go_duration(seconds: float) -> str:
    """Return a duration as OpenAI's x-ratelimit-reset headers have it: 1s, 6m0s, 120ms. Rounded up."""
    if seconds < 1.0:
        return f"{ceil(seconds * 1000)}ms"
    minutes, rest_s = divmod(ceil(seconds), 60)
    return f"{minutes}m{rest_s}s" if minutes else f"{rest_s}s"
