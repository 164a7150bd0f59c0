"""The link out of a modelled instance: one write after the other, so that concurrent senders share its bandwidth."""

from collections.abc import Mapping, Sequence

from core.messages import RegionKey
from core.ports import Clock
from kvtransfer.copies import CopyRun
from kvtransfer.transport.loopback_transport import LoopbackFabric, LoopbackSender
from sim.catalogue.cost import LinkCost


class ModelledLink:
    def __init__(self, clock: Clock, cost: LinkCost, pairs: Mapping[str, LinkCost] | None = None) -> None:
        """`pairs`: links to single receivers, which share nothing with the others."""
        self._clock, self._cost, self._pairs = clock, cost, pairs or {}
        self._free_at: dict[str, float] = {}

    async def carry(self, num_bytes: int, receiver: str = "") -> None:
        """Carry so many bytes. Returns when they have passed, after all that were sent before."""
        own = self._pairs.get(receiver)
        key, cost = (receiver, own) if own else ("", self._cost)
        now = self._clock.now()
        free_at = self._free_at[key] = max(now, self._free_at.get(key, 0.0)) + cost.duration_s(num_bytes)
        await self._clock.sleep(free_at - now)


class ModelledSender(LoopbackSender):
    """Writes take the link's time; pools have no bytes."""

    def __init__(self, fabric: LoopbackFabric, link: ModelledLink) -> None:
        super().__init__(fabric, None)
        self._link = link

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        await self._link.carry(sum(run.num_bytes for run in runs), region.endpoint)
        await super().write(grant_id, region, runs)
