"""Which blocks an instance tells the schedulers that it holds: those of the device's prefix cache and those that lie below.

A request that comes finds either, so a block counts as given up when the last of the two has given it up. Schedulers know blocks
by hashes (`core.kv.block_hashes`), and tiers know them by digests. Which belong together is learnt when the prefix cache keeps a
block. So a buddy's copies, and what a disk has from an earlier run, are told of once they have been read back. So is a block
that the cache gives up while it is still on its way out of the device."""

from collections import deque
from collections.abc import Callable
from typing import Protocol


class CacheEvents(Protocol):
    def drain_cache_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the hashes of blocks that are held, and of those that are not any more, since the last call."""
        ...

    def replay_cache_events(self) -> None:
        """Let the next `drain_cache_events` report everything that is held."""
        ...


class DeviceAndBelow:
    """What is known of a device's cache, and what is heard from below it."""

    def __init__(self, device: CacheEvents, lies_below: Callable[[bytes], bool]) -> None:
        self._device, self._lies_below = device, lies_below
        self._on_device: set[int] = set()
        """What the device has said that it holds."""
        self._gone: deque[bytes] = deque()

    def gone(self, digest: bytes) -> None:
        """Note that nothing below has a block any more. Any thread may call it."""
        self._gone.append(digest)

    def _hear(self) -> tuple[tuple[int, ...], list[bytes]]:
        """Return the hashes of blocks that have come to the device or left it since the last call, and the digests of those that
        are gone from below, to which they may have come back."""
        added, removed = self._device.drain_cache_events()
        self._on_device.update(added)
        self._on_device.difference_update(removed)
        return added + removed, [self._gone.popleft() for _ in range(len(self._gone))]

    def _replay(self) -> None:
        self._device.replay_cache_events()
        self._on_device.clear()


class HeldBlocks(DeviceAndBelow):
    """The CacheEvents of a device with lower tiers."""

    def __init__(self, device: CacheEvents, lies_below: Callable[[bytes], bool]) -> None:
        super().__init__(device, lies_below)
        self._digests: dict[int, bytes] = {}
        """By hash, of each block that was reported as held and not as given up."""
        self._hashes: dict[bytes, int] = {}
        """The same by digest."""
        self._new: dict[int, bytes] = {}
        """The digests, by hash, of blocks that the device has kept since the last report."""

    def kept(self, digest: bytes, block_hash: int) -> None:
        """Note that the device's cache keeps a block."""
        self._new[block_hash] = digest

    def drain_cache_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        moved, gone = self._hear()
        no_more = [self._hashes[digest] for digest in gone if digest in self._hashes]
        come: list[int] = []
        went: list[int] = []
        for block in dict.fromkeys((*moved, *self._new, *no_more)):
            was_held = block in self._digests
            digest = self._digests[block] if was_held else self._new.get(block, b"")
            is_held = block in self._on_device or self._lies_below(digest)
            if is_held and not was_held:
                self._digests[block], self._hashes[digest] = digest, block
                come.append(block)
            elif was_held and not is_held:
                del self._digests[block], self._hashes[digest]
                went.append(block)
        self._new.clear()
        return tuple(come), tuple(went)

    def replay_cache_events(self) -> None:
        self._replay()
        self._new = self._digests | self._new
        self._digests.clear()
        self._hashes.clear()
