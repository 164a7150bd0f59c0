"""What one tenant may still ask for: requests and tokens per minute, and sequences at once.

Requests are paid for when they come. The prompt is paid for when it is known and the output as it is delivered, so a balance may
fall below zero by what is running. Nothing new begins before it has been refilled."""

from dataclasses import dataclass
from math import ceil, inf

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """A tenant's limits; 0 means that there is none."""

    requests_per_min: int = 0
    tokens_per_min: int = 0
    concurrent: int = 0


@dataclass(frozen=True, slots=True)
class Excess:
    """Why something may not begin now, and when it may; `retry_after_s` is infinite for what never fits."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Balance:
    """The state of a limit at one moment. `reset_s` is the time until the full amount may be taken again."""

    name: str
    limit: int
    remaining: int
    reset_s: float


class TokenBucket:
    """A token bucket: holds one minute's worth, and is refilled evenly."""

    def __init__(self, name: str, per_min: int, now: float) -> None:
        self.name, self.per_min = name, per_min
        self._level, self._as_of = float(per_min), now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the time until `amount` is there: 0 when it is, infinite when it cannot be."""
        if amount > self.per_min:
            return inf
        return max(0.0, amount - self._now(now)) / self.per_min * _MINUTE_S

    def take(self, amount: float, now: float) -> None:
        """Take the amount, whether it is there or not."""
        self._level, self._as_of = self._now(now) - amount, max(now, self._as_of)

    def balance(self, now: float) -> Balance:
        level = self._now(now)
        reset_s = (self.per_min - level) / self.per_min * _MINUTE_S
        return Balance(self.name, self.per_min, max(0, int(level)), reset_s)

    def _now(self, now: float) -> float:
        elapsed_s = max(0.0, now - self._as_of)
        return min(float(self.per_min), self._level + elapsed_s * self.per_min / _MINUTE_S)


class Meter:
    """One tenant's use. What `begin` has let in must be ended with `end`."""

    def __init__(self, limits: TenantLimits, now: float) -> None:
        self.limits = limits
        self.num_running = 0
        self._requests = _bucket("requests", limits.requests_per_min, None, now)
        self._tokens = _bucket("tokens", limits.tokens_per_min, None, now)

    def change(self, limits: TenantLimits, now: float) -> None:
        """Change the limits. What runs goes on; a limit that has changed begins with a full minute's worth."""
        self.limits = limits
        self._requests = _bucket("requests", limits.requests_per_min, self._requests, now)
        self._tokens = _bucket("tokens", limits.tokens_per_min, self._tokens, now)

    def request(self, now: float) -> Excess | None:
        """Count one more request. It is paid for unless it is refused."""
        if self._requests is None:
            return None
        if wait_s := self._requests.wait_s(1, now):
            return Excess(f"{self.limits.requests_per_min} requests per minute are allowed", wait_s)
        self._requests.take(1, now)
        return None

    def begin(self, num_sequences: int, num_prompt_tokens: int, now: float) -> Excess | None:
        """Let sequences begin, or say why not."""
        most = self.limits.concurrent
        if most and self.num_running + num_sequences > most:
            reason = f"{most} sequences at once are allowed and {self.num_running} are running"
            return Excess(reason, 1.0 if num_sequences <= most else inf)
        if self._tokens is not None:
            # An empty prompt costs nothing, but may begin only while the budget is not overdrawn.
            if wait_s := self._tokens.wait_s(max(1, num_prompt_tokens), now):
                return Excess(f"{self.limits.tokens_per_min} tokens per minute are allowed", wait_s)
            self._tokens.take(num_prompt_tokens, now)
        self.num_running += num_sequences
        return None

    def spend(self, num_tokens: int, now: float) -> None:
        """Pay for output that was delivered."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)

    def end(self, num_sequences: int) -> None:
        self.num_running -= num_sequences
        assert self.num_running >= 0

    def balances(self, now: float) -> list[Balance]:
        return [bucket.balance(now) for bucket in (self._requests, self._tokens) if bucket is not None]


def _bucket(name: str, per_min: int, old: TokenBucket | None, now: float) -> TokenBucket | None:
    if not per_min:
        return None
    return old if old is not None and old.per_min == per_min else TokenBucket(name, per_min, now)


def go_duration(seconds: float) -> str:
    """Return a duration as OpenAI's x-ratelimit-reset headers have it: 1s, 6m0s, 120ms. Rounded up."""
    if seconds < 1.0:
        return f"{ceil(seconds * 1000)}ms"
    minutes, rest_s = divmod(ceil(seconds), 60)
    return f"{minutes}m{rest_s}s" if minutes else f"{rest_s}s"
