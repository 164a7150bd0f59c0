"""Which transport reaches a holder best, measured once for each holder, when the first grant of it comes.

Until the figures are there the senders' own order decides, so that no request waits for a measurement. A way that fails its probe
is used only when there is no other."""

import asyncio
import logging
from collections.abc import Sequence

from core.errors import ProtocolError, ReplicaLost, TransferError
from core.messages import RegionKey
from kvtransfer.transport.base import Sender, reachable

log = logging.getLogger(__name__)

_PROBE_BYTES = 4 << 20
_NUM_PROBES = 4
"""The number of probes. The first one also connects, and is not counted."""
_PROBE_S = 10.0

Way = tuple[Sender, RegionKey]


class Routes:
    """Routes to holders, for the event loop's thread."""

    def __init__(self, senders: Sequence[Sender]) -> None:
        self._senders = senders
        self._measured: dict[str, dict[tuple[str, str], float]] = {}
        """Holder -> (transport, endpoint) -> bytes per second; 0 where it cannot be reached that way."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def choose(self, holder: str, regions: Sequence[RegionKey]) -> list[Way]:
        """Return the best way to each rank of the holder. Raises TransferError when there is none."""
        ways = reachable(self._senders, regions)
        if holder not in self._measured and any(len(candidates) > 1 for candidates in ways):
            self._measured[holder] = {}
            task = self._tasks[holder] = asyncio.get_running_loop().create_task(self._measure(holder, ways))
            task.add_done_callback(lambda _: self._tasks.pop(holder, None))
        figures = self._measured.get(holder, {})
        return [max(candidates, key=lambda way: figures.get(_key(way), 0.0)) for candidates in ways]

    def forget(self, holder: str) -> None:
        """Forget a holder that is gone. Another one at the same address is measured anew."""
        self._measured.pop(holder, None)
        task = self._tasks.get(holder)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _measure(self, holder: str, ways: Sequence[Sequence[Way]]) -> None:
        figures: dict[tuple[str, str], float] = {}
        for candidates in ways:
            for way in candidates:
                figures[_key(way)] = await _bandwidth(*way)
        if holder in self._measured:
            self._measured[holder] = figures
            for candidates in ways:
                best = max(candidates, key=lambda way: figures[_key(way)])
                listed = ", ".join(
                    f"{sender.name} {figures[_key((sender, region))] / 1e9:.2f} GB/s"
                    for sender, region in candidates
                )
                log.info("KV to %s goes by %s: measured %s", holder, best[0].name, listed)


def _key(way: Way) -> tuple[str, str]:
    return way[1].transport, way[1].endpoint


async def _bandwidth(sender: Sender, region: RegionKey) -> float:
    """Return bytes per second, the best of a few probes; 0 when it cannot be reached."""
    loop = asyncio.get_running_loop()
    best = 0.0
    try:
        for number in range(_NUM_PROBES):
            started = loop.time()
            async with asyncio.timeout(_PROBE_S):
                num_bytes = await sender.probe(region, _PROBE_BYTES)
            if number:
                best = max(best, num_bytes / max(loop.time() - started, 1e-9))
    except (ReplicaLost, TransferError, ProtocolError, TimeoutError) as error:
        log.warning(
            "KV transport %s does not reach %s: %s",
            sender.name,
            region.endpoint,
            error or type(error).__name__,
        )
        return 0.0
    return best
