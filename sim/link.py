"""The link out of a modelled instance: one write after the other, so that concurrent senders share its bandwidth."""

from collections.abc import Sequence

from core.messages import RegionKey
from core.ports import Clock
from kvtransfer.copies import CopyRun
from kvtransfer.transport.loopback_transport import LoopbackFabric, LoopbackSender
from sim.cost import LinkCost


class ModelledLink:
    def __init__(self, clock: Clock, cost: LinkCost) -> None:
        self._clock, self._cost = clock, cost
        self._free_s = 0.0

    async def carry(self, num_bytes: int) -> None:
        """Carry so many bytes. Returns when they have passed, after all that were sent before."""
        now = self._clock.now()
        self._free_s = max(now, self._free_s) + self._cost.duration_s(num_bytes)
        await self._clock.sleep(self._free_s - now)


class ModelledSender(LoopbackSender):
    """Writes take the link's time; pools have no bytes."""

    def __init__(self, fabric: LoopbackFabric, link: ModelledLink) -> None:
        super().__init__(fabric, None)
        self._link = link

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        await self._link.carry(sum(run.num_bytes for run in runs))
        await super().write(grant_id, region, runs)
