"""The host-memory tier: a bounded number of blocks. The ends of the least recently used prefixes are given up first.

A block that comes when the one before it has been given up is given up before these: alone it is of no use. So of a prompt that
is longer than host memory, its beginning stays."""

import threading

from engine.tiers.leaves_first import LeavesFirst


class HostTier:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks: dict[bytes, bytes] = {}
        self._order = LeavesFirst()
        self._lock = threading.Lock()  # saved on the event loop, loaded on the tiers' thread

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def put(self, digest: bytes, content: bytes, before: bytes = b"") -> list[tuple[bytes, bytes, bytes]]:
        """Keep a block that follows the block `before`, which is empty for a prompt's first and where it is not known. Returns
        those that had to make room: (name, content, the block before it)."""
        with self._lock:
            self._blocks[digest] = content
            self._order.use(digest, before, goes_next=before != b"" and before not in self._blocks)
            gone: list[tuple[bytes, bytes, bytes]] = []
            while len(self._blocks) > self.num_blocks:
                first, its_before = self._order.take()
                gone.append((first, self._blocks.pop(first), its_before))
            return gone

    def learn(self, digest: bytes, before: bytes) -> None:
        """Learn which block one follows, if it is here."""
        with self._lock:
            if digest in self._blocks:
                self._order.learn(digest, before)

    def drop(self) -> list[bytes]:
        """Give up all blocks, and return their names."""
        with self._lock:
            gone = [*self._blocks]
            self._blocks.clear()
            self._order.clear()
            return gone

    def get(self, digest: bytes) -> bytes | None:
        with self._lock:
            content = self._blocks.get(digest)
            if content is not None:
                self._order.use(digest)
            return content
