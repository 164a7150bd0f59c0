"""In which order a tier gives up blocks that follow one another: the least recently used first, but none before those behind it.

So the ends of prefixes go first, and what is left of each can be read back. A use of a block is one of all before it, too: these
go after it."""

from collections import Counter, OrderedDict


class LeavesFirst:
    """The blocks of one tier. Each use takes a time that does not depend on their number, and so does each that is given up, on
    average."""

    def __init__(self) -> None:
        self._before: dict[bytes, bytes] = {}
        """For each block, the one that it follows, whether that is here or not; empty where it is not known."""
        self._num_behind: Counter[bytes] = Counter()
        """By block, here or not, how many blocks here follow it."""
        self._order: OrderedDict[bytes, None] = OrderedDict()
        """Blocks by their last use. One that others follow may be missing: it was used before anything that is in the order, and
        goes just after the last of them."""

    def use(self, digest: bytes, before: bytes = b"", *, goes_next: bool = False) -> None:
        """Note that a block has come or was used. `goes_next`: it is of no more use than what was not used for longest."""
        if digest not in self._before:
            self._before[digest] = b""
        self.learn(digest, before)
        self._order[digest] = None
        self._order.move_to_end(digest, last=not goes_next)

    def learn(self, digest: bytes, before: bytes) -> None:
        """Note which block one that is here follows."""
        if before and not self._before[digest]:
            self._before[digest] = before
            self._num_behind[before] += 1

    def take(self) -> tuple[bytes, bytes]:
        """Remove the block that goes first. Returns it and the one that it follows. There must be one."""
        digest, _ = self._order.popitem(last=False)
        while digest in self._num_behind:
            digest, _ = self._order.popitem(last=False)
        return digest, self.remove(digest)

    def remove(self, digest: bytes) -> bytes:
        """Remove a block, and return the one that it follows."""
        self._order.pop(digest, None)
        before = self._before.pop(digest)
        if before:
            self._num_behind[before] -= 1
            if not self._num_behind[before]:
                self._is_end(before)
        return before

    def _is_end(self, digest: bytes) -> None:
        """Nothing follows the block any more. It goes next unless a use of it is in the order."""
        del self._num_behind[digest]
        if digest in self._before and digest not in self._order:
            self._order[digest] = None
            self._order.move_to_end(digest, last=False)

    def clear(self) -> None:
        self._before.clear()
        self._num_behind.clear()
        self._order.clear()
