"""The prefix caches of several groups of ranks together. Blocks are numbered over all groups, and each has a range of them."""

from collections import Counter

from core.types import Request
from engine.cache.radix_cache import Kept
from engine.cache.state_checkpoints import CheckpointKept
from engine.planning.prefixes import CachedPrefix, Keep, Prefixes, ReadBack, Restore
from engine.planning.rank_groups import RankGroups


class GroupPrefixes:
    """A PrefixSource."""

    def __init__(self, groups: RankGroups, blocks_each: int) -> None:
        self._groups, self._blocks_each = groups, blocks_each
        self._every = [group.prefixes for group in groups.every]
        self._cached: Counter[int] = Counter()
        """By hash, the number of groups that keep the block."""

    def cached_prefix(self, request: Request) -> CachedPrefix:
        return max((prefixes.cached_prefix(request) for prefixes in self._every), key=_worth)

    def begin_restore(self, request: Request, num_full: int) -> Restore | None:
        """Restore behind the longest cached prefix. Among the groups that have as much of it, the one with the least to do is
        chosen."""
        most = self.cached_prefix(request)
        for prefixes in (group.prefixes for group in self._groups.by_cost(request)):
            if prefixes.cached_prefix(request) == most and (
                found := prefixes.begin_restore(request, num_full)
            ):
                return found
        return None

    def publish_restore(self, restore: Restore, count: int) -> None:
        self._of(restore).publish_restore(restore, count)

    def end_restore(self, restore: Restore) -> None:
        self._of(restore).end_restore(restore)

    def on_kept(self, hear: Kept, hear_checkpoint: CheckpointKept) -> None:
        for prefixes in self._every:
            prefixes.on_kept(hear, hear_checkpoint)

    def on_return(self, read: ReadBack, keep: Keep | None = None) -> None:
        for prefixes in self._every:
            prefixes.on_return(read, keep)

    def drain_cache_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the hashes of blocks kept and given up. A block counts as kept as long as any group keeps it."""
        before: dict[int, int] = {}
        for prefixes in self._every:
            added, removed = prefixes.drain_cache_events()
            for hashes, change in ((added, 1), (removed, -1)):
                for block in hashes:
                    before.setdefault(block, self._cached[block])
                    self._cached[block] += change
        now_kept = tuple(block for block, count in before.items() if self._cached[block] and not count)
        now_gone = tuple(block for block, count in before.items() if count and not self._cached[block])
        for block in before:
            if not self._cached[block]:
                del self._cached[block]
        return now_kept, now_gone

    def replay_cache_events(self) -> None:
        self._cached.clear()
        for prefixes in self._every:
            prefixes.replay_cache_events()

    def drop_cache(self) -> int:
        return sum(prefixes.drop_cache() for prefixes in self._every)

    def _of(self, restore: Restore) -> Prefixes:
        return self._every[restore.fresh[0] // self._blocks_each]


def _worth(prefix: CachedPrefix) -> tuple[int, int]:
    return prefix.num_usable, prefix.num_kept
