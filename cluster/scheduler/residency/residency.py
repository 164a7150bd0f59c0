"""Whether the model's instances serve or sleep, and what follows from it for those who wait.

All instances sleep, and wake up, together. Any scheduler whose requests wait wakes them; only the one that leads has them sleep.
Where the model shares memory with others, they wake up only when the owner of that memory says so (`group_owner`).

Invariant: an instance is either in the roster or among the sleepers, or on its way from one to the other (`falling asleep`)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.scheduler_events import OperatorAsked, Send
from core.config.residency_config import ResidencyConfig
from core.sleep_messages import (
    AskSleep,
    AskWake,
    Asleep,
    GoToSleep,
    GroupOrder,
    GroupState,
    KeepAwake,
    ModelDemand,
    SleepAnswer,
    WaitingDemand,
    WakeUp,
)

_LAST_S = 30.0
"""How long a sequence may still run that has come while its idle instance was told to sleep."""

_ON_ITS_WAY_S = 1.0
_WANTED_S = 60.0
"""How long a model that was refused to somebody waits at the most for its turn."""
_NEVER_DUE_S = 1e9
_LAST_SHARE = 0.5
"""How much of a predicted turn the last one makes up."""
_SWAP_S = 10.0
"""How long sequences may still run when another model shall have the memory. Those that run even then are paused."""


class Residency:
    """Feed it what happens, with `now` never going back."""

    def __init__(self, config: ResidencyConfig) -> None:
        self._config = config
        self._sleepers: dict[str, Asleep] = {}
        self._waking_since: dict[str, float] = {}
        """When each sleeper was told to wake up."""
        self._told: set[str] = set()
        """The instances that were told to sleep, and have not said that they do."""
        self._keep_s = config.idle_s
        self._idle_since = inf
        self._awake_since = self._least_until = 0.0
        self._last_wake_s = 0.0
        """How long the last waking has taken; 0: there was none."""
        self._may_wake = not config.group
        """Whether there is memory for it."""
        self._turn_since = inf
        """Since when some request asks for memory that other models have."""
        self._turn_s = 0.0
        """How long it has taken the last times from there until the model served."""
        self.order = (0, 0)
        """The epoch and the number of the group's last order."""
        self.wanted_since = inf
        """Since when something wants it awake that does not wait for it: a refused request; of an operator for ever."""

    @property
    def sleepers(self) -> tuple[Asleep, ...]:
        return tuple(self._sleepers.values())

    @property
    def is_asleep(self) -> bool:
        """Whether some instance that decodes sleeps, or is falling asleep or waking up."""
        return any(one.decodes for one in self._sleepers.values())

    @property
    def is_held(self) -> bool:
        """Whether no request wakes the instances that sleep."""
        decoding = [one for one in self._sleepers.values() if one.decodes]
        return bool(decoding) and all(
            one.held and one.state != "waking" and one.address not in self._waking_since for one in decoding
        )

    @property
    def needs_time(self) -> bool:
        """Whether something of it is to be looked at again when time has passed."""
        return self._idle_since < inf

    def why_not(self) -> str:
        """Return why a sleeping model answers no request; empty where it wakes up for one."""
        if not self.is_held:
            return ""
        level = max(one.level for one in self._sleepers.values())
        why = next((f" since {one.why}" for one in self._sleepers.values() if one.why), "")
        return f"the model sleeps (level {level}){why}: wake it by POST /wake_up or `baton models wake`"

    def wake_s(self, now: float) -> float:
        """Return how long it will take until an instance decodes that sleeps now. Where other models have the memory, that is
        what the last swaps took: others made way in that time."""
        left_s = min((self._left_s(one, now) for one in self._sleepers.values() if one.decodes), default=0.0)
        waited_s = now - self._turn_since if self._turn_since < inf else 0.0
        return left_s if self._may_wake else max(left_s, self._turn_s - waited_s)

    def _left_s(self, one: Asleep, now: float) -> float:
        since = self._waking_since.get(one.address)
        return one.wake_s if since is None else max(0.0, one.wake_s - (now - since))

    def completed(
        self, asked: ModelDemand, members: Sequence[Member], num_instances: int, now: float
    ) -> ModelDemand:
        """Return what the group is told: what the model is asked for, and its state."""
        waiting, age = asked.waiting, asked.age
        if self.wanted_since < inf:
            waiting = (*waiting, WaitingDemand(0, 1, _NEVER_DUE_S))
            age = max(age, min(1.0, (now - self.wanted_since) / _WANTED_S))
        return replace(
            asked,
            state=self._state(members, num_instances),
            order=self.order,
            waiting=waiting,
            age=age,
            wake_s=max((one.wake_s for one in self._sleepers.values()), default=0.0) or self._last_wake_s,
            sleeps_in_s=max(0.0, self._awake_since + self._config.least_awake_s - now),
        )

    def _state(self, members: Sequence[Member], num_instances: int) -> GroupState:
        """Return whether the model, which has `num_instances` instances, has memory as its group counts it."""
        sleepers = self._sleepers.values()
        if not members and len(sleepers) >= num_instances and all(one.state == "asleep" for one in sleepers):
            return "waking" if self._waking_since else "held" if self.is_held else "asleep"
        if self._told or any(one.state == "falling asleep" for one in sleepers):
            return "falling asleep"
        num_held = sum(one.held for one in sleepers)
        has_more = members and len(sleepers) > num_held
        if self._waking_since or any(one.state == "waking" for one in sleepers) or has_more:
            return "waking"
        return "serving" if members and len(members) + num_held >= num_instances else "unknown"

    def on(
        self, event: Asleep | KeepAwake | OperatorAsked | GroupOrder, members: Sequence[Member], now: float
    ) -> list[Send]:
        """Take in what an instance, a client, an operator or the owner of the group has said."""
        match event:
            case Asleep():
                self.hear(event)
                self._note_lost_memory(members)
            case KeepAwake(seconds):
                self.keep_awake(seconds, now)
            case OperatorAsked(frontend, ask):
                return self.ask(frontend, ask, members, now)
            case GroupOrder():
                return self._obey(event, members, now)
        return []

    def _obey(self, order: GroupOrder, members: Sequence[Member], now: float) -> list[Send]:
        if (order.epoch, order.number) <= self.order:
            return []
        self.order = (order.epoch, order.number)
        if order.awake is None or (order.awake and self.is_held):
            return []
        if order.awake:
            self._may_wake = True
            return self.wake(now)
        sleep = GoToSleep(level=self._config.level, timeout_s=_SWAP_S)
        return self._sleep(members, sleep, [*self._waking_since])

    def _sleep(self, members: Iterable[Member], order: GoToSleep, others: Iterable[str] = ()) -> list[Send]:
        """Have all instances that serve sleep, and `others`. A model of a group has then to be given memory again."""
        self._told = {member.address for member in members if not member.leaving}
        whom = [*sorted(self._told), *others]
        self._waking_since.clear()
        self._may_wake = not self._config.group
        return [Send(address, order) for address in whom]

    def hear(self, said: Asleep) -> None:
        """An instance says that it does not serve."""
        self._told.discard(said.address)
        self._sleepers[said.address] = said

    def _note_lost_memory(self, members: Sequence[Member]) -> None:
        """Have a model of a group ask for memory anew where none of its instances has any, since all have failed: its owner may
        have given it to another model by then."""
        if self._config.group and not self._waking_since and all(each.leaving for each in members):
            self._may_wake &= any(one.state != "asleep" for one in self._sleepers.values())

    def serves(self, address: str, now: float) -> None:
        """An instance has registered: a new one, or one that has woken up."""
        if (since := self._waking_since.get(address)) is not None:
            self._last_wake_s = now - since
        if self._turn_since < inf:
            took_s, self._turn_since = now - self._turn_since, inf
            self._turn_s += _LAST_SHARE * (took_s - self._turn_s) if self._turn_s else took_s
        self.lost(address)
        self._awake_since, self.wanted_since = now, inf

    def lost(self, address: str) -> None:
        """An instance is gone."""
        self._told.discard(address)
        self._sleepers.pop(address, None)
        self._waking_since.pop(address, None)

    def keep_awake(self, seconds: float, now: float) -> None:
        """A client has said how long the model shall stay awake after its request, which may still be on its way. The last word
        holds."""
        self._keep_s, self._least_until = seconds, now + _ON_ITS_WAY_S

    def ask(
        self, frontend: str, asked: AskSleep | AskWake, members: Iterable[Member], now: float
    ) -> list[Send]:
        """Have all instances sleep, or wake up, since an operator wants it."""
        if isinstance(asked, AskWake):
            self.wanted_since = -inf
            self._sleepers = {name: replace(one, held=False) for name, one in self._sleepers.items()}
            wakes = self.wake(now) if self._may_wake else []
            return [*wakes, Send(frontend, SleepAnswer(asked.nonce))]
        if self._config.mode == "always":
            why = "the model is always awake: schedule.residency.mode is always, and has to be manual or on_demand"
            return [Send(frontend, SleepAnswer(asked.nonce, why))]
        order = GoToSleep(
            level=asked.level,
            pauses=asked.pauses,
            timeout_s=asked.timeout_s,
            held=self._config.mode == "manual",
            drops=asked.drops,
        )
        sleeping = [one.address for one in self._sleepers.values()]
        return [*self._sleep(members, order, sleeping), Send(frontend, SleepAnswer(asked.nonce))]

    def wake(self, now: float) -> list[Send]:
        """Wake all instances that sleep, or are falling asleep, and were not told so before, nor are held."""
        whom = [
            one.address
            for one in self._sleepers.values()
            if one.state != "waking" and one.address not in self._waking_since and not one.held
        ]
        for address in whom:
            self._waking_since[address] = now
        return [Send(address, WakeUp()) for address in whom]

    def wake_for_request(self, now: float) -> list[Send]:
        """As `wake`, where a request may do so. In a group that is noted for its owner."""
        if self.is_held:
            return []
        if self._may_wake:
            return self.wake(now)
        self._turn_since = min(self._turn_since, now)
        self.wanted_since = min(self.wanted_since, now)
        return []

    def look(
        self, members: Sequence[Member], num_here: tuple[int, int], now: float, *, leads: bool
    ) -> list[Send]:
        """Return whom to wake, since requests wait that nobody serves, or whom to have sleep, since nobody has asked for long.
        `num_here` are the requests that are placed, and those that wait."""
        if not self._sleepers and (self._config.mode != "on_demand" or any(num_here)):
            self._idle_since = inf
            return []
        serving = [member for member in members if not member.leaving]
        if self._config.group and self._may_wake and self._sleepers:
            return self.wake(now)
        if self.is_asleep and num_here[1] and not any(m.decodes for m in serving):
            if self._may_wake:
                return self.wake_for_request(now)
            self._turn_since = min(self._turn_since, now)
            return []
        if any(num_here) or not serving or self._config.mode != "on_demand" or self._told:
            self._idle_since = inf
            return []
        self._idle_since = min(self._idle_since, now)
        is_due = now - self._idle_since >= self._keep_s
        may_sleep = now >= max(self._least_until, self._awake_since + self._config.least_awake_s)
        if not (leads and is_due and may_sleep):
            return []
        return self._sleep(serving, GoToSleep(level=self._config.level, timeout_s=_LAST_S))
