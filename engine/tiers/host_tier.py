"""The host-memory tier: a bounded number of blocks. The least recently used is given up first."""

import threading
from collections import OrderedDict


class HostTier:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()  # saved on the event loop, loaded on the tiers' thread

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._blocks

    def put(self, digest: bytes, content: bytes) -> list[tuple[bytes, bytes]]:
        """Keep a block, and return the blocks that had to make room."""
        with self._lock:
            self._blocks[digest] = content
            self._blocks.move_to_end(digest)
            gone: list[tuple[bytes, bytes]] = []
            while len(self._blocks) > self.num_blocks:
                gone.append(self._blocks.popitem(last=False))
            return gone

    def drop(self) -> int:
        """Give up all blocks. Returns how many there were."""
        with self._lock:
            count = len(self._blocks)
            self._blocks.clear()
            return count

    def get(self, digest: bytes) -> bytes | None:
        with self._lock:
            content = self._blocks.get(digest)
            if content is not None:
                self._blocks.move_to_end(digest)
            return content
