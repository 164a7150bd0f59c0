"""The schedulers that act at once, as one of them sees it.

Each places a part of the requests. It tells the others what it has placed (`core.messages.PlacedByPeer`) and what of that is over
(`ReleasedByPeer`), so that all know of all reservations, however old reports are. What only one may do (pair buddies, size pools)
is done by the one that leads: the first by address of those that live, as each of them sees it.

Two that hold each other dead, or that have not heard of each other yet, may both lead for a while. They then tell the same
instances the same buddies and set the same sizes from the same reports."""

from core.messages import PeerRequest, PeersChanged


class SchedulerPeers:
    def __init__(self) -> None:
        self.me = ""
        self.others: tuple[str, ...] = ()
        self._num_spares = 0
        self._requests: dict[str, PeerRequest] = {}
        """By scheduler, what it asked its peers for last."""

    @property
    def leads(self) -> bool:
        return all(self.me < other for other in self.others)

    @property
    def num_placing(self) -> int:
        """How many of all are asked for places: spares are not, while the others live."""
        return max(1, 1 + len(self.others) - self._num_spares)

    def meet(self, peer_schedulers: PeersChanged) -> list[str]:
        """Return those that were not known before."""
        news = [other for other in peer_schedulers.others if other not in self.others]
        self.me, self.others = peer_schedulers.me, peer_schedulers.others
        self._num_spares = peer_schedulers.num_spares
        return news

    def lose(self, address: str) -> None:
        self.others = tuple(other for other in self.others if other != address)
        self._requests.pop(address, None)

    def hear(self, request: PeerRequest) -> None:
        self._requests[request.scheduler] = request

    def others_in_time(self, level: int) -> bool:
        """Return whether another has requests of this level or a higher one that wait and can still be in time."""
        return bool(self._requests) and any(
            request.timely_level is not None and request.timely_level >= level
            for request in self._requests.values()
        )

    def is_kept(self, address: str, *, is_mine: bool) -> bool:
        """Return whether another scheduler keeps this instance for a request. Of two that keep the same one, the first has it."""
        return bool(self._requests) and any(
            request.keeps == address and not (is_mine and self.me < scheduler)
            for scheduler, request in self._requests.items()
        )
