"""The links out of one instance, as the scheduler sees them: how fast they are, and the bytes that are reserved to go over them.

Invariant: bytes are reserved from placement until their sender says that they have left, or the request is over."""

from collections.abc import Iterable

from core.reports import LinkSpeed


class OutLinks:
    __slots__ = ("_by_locality", "_reserved", "_speeds", "_to", "fastest_bytes_per_s", "total_bytes")

    def __init__(self) -> None:
        self._speeds: dict[str, LinkSpeed] = {}
        """By receiver, what was reported last."""
        self._by_locality: dict[str, LinkSpeed] = {}
        """By the receivers' host or card, for those to which nothing has gone yet."""
        self._reserved: dict[str, tuple[str, int]] = {}
        """Attempt -> (receiver, bytes)."""
        self._to: dict[str, int] = {}
        """Receiver -> bytes that are reserved."""
        self.total_bytes = 0
        self.fastest_bytes_per_s = 0.0
        """The speed of the fastest known link; 0 where none is known."""

    @property
    def is_known(self) -> bool:
        """Whether the speed of any link is known."""
        return bool(self._speeds)

    def hear(self, links: Iterable[LinkSpeed], localities: Iterable[str]) -> None:
        """Take over what the instance reports. `localities` are the receivers' (`link_model.locality`), empty where one is not
        known."""
        self._speeds, self._by_locality = {}, {}
        for link, locality in zip(links, localities, strict=True):
            known = self._speeds.get(link.receiver)
            if known is None or link.bytes_per_s > known.bytes_per_s:
                self._speeds[link.receiver] = link
            if locality:
                self._by_locality[locality] = link
        self.fastest_bytes_per_s = max((link.bytes_per_s for link in self._speeds.values()), default=0.0)

    def speed(self, receiver: str, locality: str) -> LinkSpeed | None:
        """Return what is known of the link to that instance, or else to its locality; None where nothing is."""
        return self._speeds.get(receiver) or self._by_locality.get(locality)

    def bytes_to(self, receiver: str) -> int:
        """Return the bytes that are reserved on that link."""
        return self._to.get(receiver, 0)

    def reserve(self, key: str, receiver: str, num_bytes: int) -> None:
        self.give_back(key)
        self._reserved[key] = (receiver, num_bytes)
        self._to[receiver] = self._to.get(receiver, 0) + num_bytes
        self.total_bytes += num_bytes

    def give_back(self, key: str) -> None:
        """Nothing happens where nothing is reserved for it."""
        if (reserved := self._reserved.pop(key, None)) is None:
            return
        receiver, num_bytes = reserved
        self.total_bytes -= num_bytes
        if (left := self._to[receiver] - num_bytes) > 0:
            self._to[receiver] = left
        else:
            del self._to[receiver]
