"""Memory for the bodies that are coming in: so much for all of them together, and half of that for one tenant."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from core.errors import Overloaded

MAX_BYTES = 512 << 20


class BodyRoom:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._taken: Counter[str] = Counter()
        """By tenant, the bytes that have come."""

    @contextmanager
    def coming(self, tenant: str) -> Generator["ComingBody"]:
        """Give a body room, for as long as it comes in."""
        body = ComingBody(self, tenant)
        try:
            yield body
        finally:
            self.take(tenant, -body.num_bytes)

    def take(self, tenant: str, num_bytes: int) -> None:
        """Raise Overloaded where there is no room."""
        if num_bytes > 0 and (
            self._taken[tenant] + num_bytes > self._max_bytes // 2
            or self._taken.total() + num_bytes > self._max_bytes
        ):
            raise Overloaded("too many long bodies are coming in at once: send it again", retry_after_s=1.0)
        self._taken[tenant] += num_bytes
        if not self._taken[tenant]:
            del self._taken[tenant]


class ComingBody:
    def __init__(self, room: BodyRoom, tenant: str) -> None:
        self._room, self._tenant = room, tenant
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Take room for some more bytes. Raises Overloaded."""
        self._room.take(self._tenant, num_bytes)
        self.num_bytes += num_bytes
