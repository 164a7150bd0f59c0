"""The adapters that an instance has: those of its configuration, and those that the cluster's list asks for."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set

from core.adapter_messages import EMPTY_LIST, AdapterList, AdaptersHeld
from core.config.adapter_config import AdapterConfig, AdapterPlace, HoldAdapters
from core.errors import ReplicaLost
from core.ports import Clock

log = logging.getLogger(__name__)

_LOOK_S = 0.05
Hold = Callable[[HoldAdapters], Awaitable[dict[str, str]]]
"""`core.ports.WorkerGroup.hold_adapters`"""


class InstanceAdapters:
    """Follows the list while `run` runs, one version after the other; versions that were replaced meanwhile are left out."""

    def __init__(
        self,
        config: AdapterConfig,
        fixed: frozenset[str],
        *,
        hold: Hold,
        in_use: Callable[[], Set[str]],
        tell: Callable[[AdaptersHeld], None],
        clock: Clock,
    ) -> None:
        """`fixed` are the configuration's. `in_use` says which adapters the sequences that are here have. `tell` is called with
        what is so now, for every scheduler."""
        self._config, self._fixed, self._clock = config, fixed, clock
        self._hold, self._in_use, self._tell = hold, in_use, tell
        self._held = frozenset[str]()
        self._wanted, self._said = EMPTY_LIST, AdaptersHeld(EMPTY_LIST.version)
        self._changed = asyncio.Event()

    def __contains__(self, key: str) -> bool:
        return key in self._fixed or key in self._held

    def introduction(self) -> tuple[AdapterList, AdaptersHeld] | tuple[()]:
        """Return what a scheduler is told that knows nothing; nothing where the configuration's adapters are all that there will
        be."""
        return (self._wanted, self._said) if self._config.num_slots else ()

    def hear(self, listed: AdapterList) -> None:
        if listed.version > self._wanted.version:
            self._wanted = listed
            self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._follow(self._wanted)
            except ReplicaLost:
                return  # the engine has heard of it, too, and the instance ends
            except Exception:
                log.exception("cannot follow version %s of the list of adapters", self._wanted.version)

    async def _follow(self, listed: AdapterList) -> None:
        wanted = {each.key: AdapterPlace(each.key, each.folder) for each in listed.adapters}
        gone, self._held = self._held - wanted.keys(), self._held & wanted.keys()
        while gone & self._in_use():
            # The list's owner knows of no request that needs it. One that has come anew may not have heard of all.
            await self._clock.sleep(_LOOK_S)
        new = [key for key in wanted if key not in self._held]
        room = self._config.num_slots - len(self._held)
        refused = dict.fromkeys(
            new[max(0, room) :], f"all of its {self._config.num_slots} slots are taken (adapters.slots)"
        )
        asked = [wanted[key] for key in wanted if key not in refused]
        refused |= await self._hold(self._asked(asked))
        held = [place for place in asked if place.key not in refused]
        if len(held) < len(asked):
            await self._hold(self._asked(held))  # other ranks may have what one has refused
        for key in refused:
            log.error("the adapter %s is not here: %s", key, refused[key])
        self._held = frozenset(place.key for place in held)
        self._said = AdaptersHeld(listed.version, tuple(refused.items()))
        self._tell(self._said)

    def _asked(self, places: list[AdapterPlace]) -> HoldAdapters:
        return HoldAdapters(tuple(places), self._config.folders, self._config.max_rank)
