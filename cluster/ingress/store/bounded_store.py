"""Values by an id, in this process's memory, within a bound of bytes."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedStore(Generic[T]):
    """The first in order make room for new ones."""

    def __init__(self, capacity_bytes: int, forgotten: Callable[[T], None] | None = None) -> None:
        """`forgotten` hears of each value that leaves."""
        self.capacity_bytes = capacity_bytes
        self._forgotten = forgotten
        self._stored: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._bytes = 0

    def put(self, key: str, value: T, num_bytes: int) -> bool:
        """Store a value last, and remove an older one of its id. Returns whether it is kept: one that alone exceeds the bound is
        not."""
        self.forget(key)
        if num_bytes > self.capacity_bytes:
            return False
        self._stored[key] = value, num_bytes
        self._bytes += num_bytes
        while self._bytes > self.capacity_bytes:
            self.forget(next(iter(self._stored)))
        return True

    def get(self, key: str) -> T | None:
        found = self._stored.get(key)
        return None if found is None else found[0]

    def move_to_end(self, key: str) -> None:
        """Let a value make room later than all others."""
        self._stored.move_to_end(key)

    def forget(self, key: str) -> None:
        """Remove a value. One that is not there is no error."""
        if found := self._stored.pop(key, None):
            self._bytes -= found[1]
            if self._forgotten is not None:
                self._forgotten(found[0])
