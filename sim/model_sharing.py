"""Models that share memory which holds only some of them, simulated: one trace per model, and a policy that says who is awake.

A device computes prompts one after the other, and generates beside that. A model that falls asleep ends what it has begun. Only
who is awake when is simulated: there is no batching, no cache and no link. `sim.coarse` has those."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from cluster.scheduler.residency.group_owner import GroupOwner
from core.sleep_messages import ArrivedDemand, GroupOrder, GroupState, ModelDemand, WaitingDemand

STEP_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingSpeed:
    """The speed of one model on its device."""

    wake_s: float
    prompt_tokens_per_s: float
    output_token_s: float
    least_awake_s: float


@dataclass(slots=True)
class SharedRequest:
    arrival_at: float
    input_tokens: int
    output_tokens: int
    first_at: float = inf

    def is_in_time(self, target_s: float) -> bool:
        return self.first_at - self.arrival_at <= target_s


@dataclass(slots=True)
class SharedModel:
    name: str
    speed: SharingSpeed
    target_s: float
    patience_s: float
    requests: Sequence[SharedRequest]
    state: GroupState = "asleep"
    order: tuple[int, int] = (0, 0)
    waiting: deque[SharedRequest] = field(default_factory=deque[SharedRequest])
    running: list[float] = field(default_factory=list[float])
    """When each request ends that has its first token, or will have it."""
    used_at: float = -inf
    awake_at: float = -inf
    free_at: float = 0.0
    """When its device has computed the prompts that it has begun."""
    num_arrived: int = 0
    num_wakings: int = 0

    def step(self, now: float) -> None:
        """Take in who has come, and serve as far as it is awake."""
        while self.num_arrived < len(self.requests) and self.requests[self.num_arrived].arrival_at <= now:
            self.waiting.append(self.requests[self.num_arrived])
            self.num_arrived += 1
        while self.waiting and now - self.waiting[0].arrival_at > self.patience_s:
            self.waiting.popleft()  # refused
        if self.state == "waking" and now >= self.awake_at:
            self.state = "serving"
        self.running = [end for end in self.running if end > now]
        while self.state == "serving" and self.waiting and self.free_at <= now:
            self._serve(self.waiting.popleft(), now)
        if self.waiting or self.running:
            self.used_at = now
        if self.state == "falling asleep" and not self.running and self.free_at <= now:
            self.state = "asleep"

    def _serve(self, request: SharedRequest, now: float) -> None:
        self.free_at = max(self.free_at, now) + request.input_tokens / self.speed.prompt_tokens_per_s
        request.first_at = self.free_at
        self.running.append(self.free_at + request.output_tokens * self.speed.output_token_s)

    def wake(self, now: float) -> None:
        if self.state == "asleep":
            self.state, self.awake_at = "waking", now + self.speed.wake_s
            self.num_wakings += 1

    def sleep(self) -> None:
        if self.state == "serving":
            self.state = "falling asleep"

    def demand(self, now: float) -> ModelDemand:
        """Return what its scheduler would tell the group."""
        oldest_s = now - self.waiting[0].arrival_at if self.waiting else 0.0
        due = [round(one.arrival_at + self.target_s - now) for one in self.waiting]
        return ModelDemand(
            model=self.name,
            state=self.state,
            order=self.order,
            waiting=tuple(WaitingDemand(0, due.count(left), left) for left in sorted(set(due))[:64]),
            arrived=(ArrivedDemand(0, self.target_s, self.num_arrived),),
            num_running=len(self.running),
            age=oldest_s / self.patience_s,
            wake_s=self.speed.wake_s,
            sleeps_in_s=max(0.0, self.awake_at + self.speed.least_awake_s - now),
        )


class SharingPolicy(Protocol):
    """Who is awake."""

    def step(self, models: Sequence[SharedModel], num_awake: int, now: float) -> None: ...


class ByDemand:
    """The production owner."""

    def __init__(self) -> None:
        self._owner: GroupOwner | None = None

    def step(self, models: Sequence[SharedModel], num_awake: int, now: float) -> None:
        if self._owner is None:
            self._owner = GroupOwner([model.name for model in models], num_awake, 1)
        by_name = {model.name: model for model in models}
        for model in models:
            for name, order in self._owner.on(model.demand(now), now):
                _obey(by_name[name], order, now)


class LeastRecentlyUsed:
    """Each request for a model that sleeps wakes it, in the order of arrival. The model that was not used for longest makes way,
    once it has ended what it had begun. So do Ollama and llama-swap."""

    def step(self, models: Sequence[SharedModel], num_awake: int, now: float) -> None:
        asked = sorted(
            (model for model in models if model.state == "asleep" and model.waiting),
            key=lambda model: model.waiting[0].arrival_at,
        )
        held = [model for model in models if model.state != "asleep"]
        for model in asked[: max(0, num_awake - len(held))]:
            model.wake(now)
            held.append(model)
        leaving = sum(model.state == "falling asleep" for model in models)
        serving = sorted(
            (model for model in held if model.state == "serving"),
            key=lambda model: (model.used_at, model.awake_at),
        )
        waiting = [model for model in asked if model.state == "asleep"]
        for victim in serving[: max(0, len(waiting) - leaving)]:
            victim.sleep()


class OwnDevices:
    """Every model is awake all the time, on a device of its own."""

    def step(self, models: Sequence[SharedModel], num_awake: int, now: float) -> None:
        for model in models:
            if model.state == "asleep":
                model.state = "serving"


def simulate_sharing(
    models: Sequence[SharedModel], policy: SharingPolicy, num_awake: int, lasts_s: float
) -> dict[str, float]:
    """Return the share of requests in time, of all and of the model that does worst, and wakings per hour."""
    for number in range(int(lasts_s / STEP_S)):
        now = number * STEP_S
        for model in models:
            model.step(now)
        policy.step(models, num_awake, now)
    shares = [
        sum(one.is_in_time(model.target_s) for one in model.requests) / max(1, len(model.requests))
        for model in models
    ]
    num = sum(len(model.requests) for model in models)
    in_time = sum(share * len(model.requests) for share, model in zip(shares, models, strict=True))
    return {
        "in_time": in_time / max(1, num),
        "worst_model": min(shares),
        "wakings_per_hour": sum(model.num_wakings for model in models) * 3600 / lasts_s,
    }


def _obey(model: SharedModel, order: GroupOrder, now: float) -> None:
    model.order = (order.epoch, order.number)
    if order.awake:
        model.wake(now)
    elif order.awake is not None:
        model.sleep()
