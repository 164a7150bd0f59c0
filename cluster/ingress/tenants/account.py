"""What one request may take of all limits that concern it: its key's, its tenant's and its model's."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from math import ceil, isfinite

from cluster.ingress.tenants.shares import Shares
from cluster.ingress.tenants.use_limits import Excess, Limited, Need, go_duration, needs_to_begin
from core.errors import Overloaded, RequestError


class Account:
    def __init__(
        self,
        shares: Shares,
        now: Callable[[], float],
        limited: Sequence[Limited],
        with_model: Callable[[str], Sequence[Limited]],
        check_budget: Callable[[Limited], None],
    ) -> None:
        """`with_model` returns what else is limited for requests to a model. `check_budget` raises Overloaded."""
        self._shares, self._now, self._limited = shares, now, limited
        self._with_model, self._check_budget = with_model, check_budget

    async def count_request(self) -> None:
        """Count one more request. Raises Overloaded."""
        await self._take([Need(limit, 1) for one in self._limited for limit in one.requests])

    @asynccontextmanager
    async def running(
        self, num_sequences: int, num_prompt_tokens: int, num_output_tokens: int = 0, model: str = ""
    ) -> AsyncGenerator["RunningUse"]:
        """Count sequences while they run. Raises Overloaded, or RequestError for what would never be allowed."""
        of_model = self._with_model(model) if model else ()
        needs = [Need(limit, 1) for one in of_model for limit in one.requests]
        limited = (*self._limited, *of_model)
        for one in limited:
            self._check_budget(one)
        needs += needs_to_begin(limited, num_sequences, num_prompt_tokens, num_output_tokens)
        await self._take(needs)
        use = RunningUse(self._shares, needs, num_prompt_tokens, self._now())
        try:
            yield use
        finally:
            use.end()

    def spend(self, num_tokens: int) -> None:
        """Count tokens that no sequence runs for."""
        for one in self._limited:
            for limit in one.tokens:
                self._shares.spend(limit, num_tokens)

    def headers(self) -> dict[str, str]:
        """Return OpenAI's x-ratelimit headers. Of several limits they show the one of which the least is left."""
        found: dict[str, str] = {}
        for what in ("requests", "tokens"):
            limits = [
                limit for one in self._limited for limit in (*one.requests, *one.tokens) if limit.what == what
            ]
            if not limits:
                continue
            tightest = min(map(self._shares.balance, limits), key=lambda one: one.remaining / one.limit.most)
            found[f"x-ratelimit-limit-{what}"] = str(tightest.limit.most)
            found[f"x-ratelimit-remaining-{what}"] = str(tightest.remaining)
            found[f"x-ratelimit-reset-{what}"] = go_duration(tightest.reset_s)
        return found

    async def _take(self, needs: Sequence[Need]) -> None:
        if needs and (excess := await self._shares.take(needs)) is not None:
            raise _refusal(excess)


class RunningUse:
    """What a request's sequences have taken, until `end`."""

    def __init__(
        self, shares: Shares, needs: Sequence[Need], num_prompt_tokens: int, taken_at: float
    ) -> None:
        self._shares, self._taken_at, self.num_output = shares, taken_at, 0
        self._sequences = [need for need in needs if need.limit.what == "sequences"]
        self._set_aside = {
            need.limit: max(0, need.amount - num_prompt_tokens)
            for need in needs
            if need.limit.what == "tokens"
        }

    def spend(self, num_tokens: int) -> None:
        """Count output that was delivered: first from what was set aside for it."""
        self.num_output += num_tokens
        for limit, left in self._set_aside.items():
            self._set_aside[limit] = max(0, left - num_tokens)
            if num_tokens > left:
                self._shares.spend(limit, num_tokens - left)

    def end(self) -> None:
        for limit, left in self._set_aside.items():
            self._shares.give_back(limit, left, self._taken_at)
        for need in self._sequences:
            self._shares.give_back(need.limit, need.amount, self._taken_at)


def _refusal(excess: Excess) -> Overloaded | RequestError:
    if isfinite(excess.retry_after_s):
        reason = f"rate limit: {excess.reason}; come again in {ceil(excess.retry_after_s)} s"
        return Overloaded(reason, excess.retry_after_s, "rate_limit_exceeded")
    message = f"this request alone exceeds the rate limit: {excess.reason}"
    return RequestError(message, status=429, code="rate_limit_exceeded")
