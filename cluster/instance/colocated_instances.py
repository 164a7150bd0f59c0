"""One process's instances of models that share memory: one of each model, all of which begin asleep.

Which of them are awake is for their group's owner to say. One that fails is replaced here, since the process is others', too."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from cluster.instance.instance_parts import Role
from cluster.instance.kept_instances import KeptInstances
from cluster.instance.resident_instance import ResidentInstance
from core.ports import Clock

MakeInstance = Callable[[Role, str], Awaitable[ResidentInstance]]
"""Makes an instance that runs and sleeps. With a reason, only an operator wakes it."""


class ColocatedInstances:
    """`start` makes them; `close` gives everything back. It stands for a ResidentInstance where one process is looked at."""

    def __init__(self, role: Role, makes: Sequence[MakeInstance], clock: Clock) -> None:
        self.role: Role = role
        self.stuck = asyncio.Event()
        """As `ResidentInstance.stuck`, of any of them."""
        self._kept = [self._keeping(make, clock) for make in makes]
        self._watching: set[asyncio.Task[None]] = set()

    def _keeping(self, make: MakeInstance, clock: Clock) -> KeptInstances[ResidentInstance]:
        async def made(role: Role, rests: str = "") -> ResidentInstance:
            instance = await make(role, rests)
            watching = asyncio.create_task(self._watch(instance))
            self._watching.add(watching)
            watching.add_done_callback(self._watching.discard)
            return instance

        return KeptInstances(made, clock, lambda _: None, replaces=True, rest=made)

    async def start(self) -> None:
        """Make all of them. They run. Raises what making one raises."""
        for kept in self._kept:
            await kept.start(self.role)

    @property
    def failure(self) -> BaseException | None:
        """Why the process is of no use any more: a thread of it computes for ever. None: it is of use."""
        return next((one.failure for one in self._running if one.stuck.is_set()), None)

    @property
    def computes(self) -> bool:
        """Whether a request for one of the models would be computed, perhaps after that model has woken up."""
        return any(one.computes for one in self._running)

    @property
    def _running(self) -> list[ResidentInstance]:
        return [one for kept in self._kept for one in kept.running]

    async def drain(self, timeout_s: float) -> None:
        """As `Instance.drain`, of all of them at once."""
        await asyncio.gather(*(one.drain(timeout_s) for one in self._running))

    async def close(self) -> None:
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*(kept.close() for kept in self._kept))

    async def _watch(self, instance: ResidentInstance) -> None:
        """Look for a thread that never ends, until the instance has failed for another reason."""
        sticking = asyncio.create_task(instance.stuck.wait())
        failing = asyncio.create_task(instance.failed())
        try:
            await asyncio.wait([sticking, failing], return_when=asyncio.FIRST_COMPLETED)
            if instance.stuck.is_set():
                self.stuck.set()
        finally:
            sticking.cancel()
            failing.cancel()
