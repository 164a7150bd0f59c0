"""What operators and clients of one ingress want of the model's sleep, passed on to the scheduler that leads."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from cluster.ingress.delivery.questions import Questions
from core.errors import ReplicaLost, RequestError
from core.ports import Clock, Mail
from core.reports import Status
from core.sleep_messages import AskSleep, AskWake, KeepAwake, SleepAnswer, SleepLevel
from net.schedulers import Schedulers

_LOOK_S = 0.05
_SETTLE_S = 60.0
"""How long instances may take to fall asleep once nothing runs there: writers may have to be fenced."""
_WAKE_S = 600.0
_ANSWER_S = 60.0
"""How long a busy scheduler may take to answer an order."""


class ModelSleep:
    def __init__(
        self,
        mail: Mail,
        clock: Clock,
        schedulers: Schedulers,
        questions: Questions,
        status: Callable[[], Awaitable[Status]],
    ) -> None:
        self._mail, self._clock, self._schedulers = mail, clock, schedulers
        self._questions, self._status = questions, status

    async def sleep(self, level: SleepLevel, *, pauses: bool, timeout_s: float, drops: bool) -> None:
        """Have all instances sleep, and return when they do. Raises RequestError where the model may not, and ReplicaLost."""
        ask = partial(_ask_sleep, level, pauses=pauses, timeout_s=timeout_s, drops=drops)
        await self._ask(ask)
        await self._until(sleeps, timeout_s + _SETTLE_S, "fell asleep")

    async def wake(self) -> None:
        """Have all instances wake up, and return when they serve. Raises ReplicaLost."""
        await self._ask(AskWake)
        await self._until(lambda status: not status.sleepers, _WAKE_S, "woke up")

    async def is_sleeping(self) -> bool:
        """Return whether no instance serves, since they sleep. Raises ReplicaLost."""
        return sleeps(await self._status())

    def keep_awake(self, seconds: float) -> None:
        """Note how long the model shall stay awake once no request is left."""
        for scheduler in self._schedulers.living:
            self._mail.send(scheduler, KeepAwake(seconds))

    async def _ask(self, question: Callable[[int], AskSleep | AskWake]) -> None:
        if not (scheduler := self._schedulers.first):
            raise ReplicaLost("the scheduler is not known yet")
        answer: SleepAnswer = await self._questions.ask(scheduler, question, "the scheduler", _ANSWER_S)
        if answer.why:
            raise RequestError(answer.why, status=403, code="model_stays_awake")

    async def _until(self, is_so: Callable[[Status], bool], timeout_s: float, what: str) -> None:
        """Wait until the status `is_so`. A status that does not come is asked for again. Raises ReplicaLost at the end."""
        ends_at = self._clock.now() + timeout_s
        while self._clock.now() < ends_at:
            with suppress(ReplicaLost):
                if is_so(await self._status()):
                    return
            await asyncio.sleep(_LOOK_S)
        raise ReplicaLost(f"not every instance {what} within {timeout_s:g} s: GET /cluster says which")


def _ask_sleep(level: SleepLevel, nonce: int, *, pauses: bool, timeout_s: float, drops: bool) -> AskSleep:
    return AskSleep(nonce=nonce, level=level, pauses=pauses, timeout_s=timeout_s, drops=drops)


def sleeps(status: Status) -> bool:
    """Return whether no instance serves, since all sleep."""
    return (
        bool(status.sleepers)
        and all(one.state == "asleep" for one in status.sleepers)
        and all(one.leaving for one in status.instances)
    )
