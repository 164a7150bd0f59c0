"""Lower tiers of a fake rank, which have what the prefix cache has kept and they have not given up."""

import random
from ast import literal_eval
from collections.abc import Callable, Sequence

from core.kv import block_hashes
from core.types import Request
from engine.planning.planner_protocol import Planner
from engine.planning.prefixes import PrefixPlace, Restore
from engine.tiers.held_blocks import HeldBlocks
from engine.tiers.held_checkpoints import HeldCheckpoints
from tests.property.fake_rank import FakeRank

Prefix = tuple[str, tuple[int, ...]]
"""A salt, and tokens."""


def _named(prefix: Prefix) -> bytes:
    return repr(prefix).encode()


class Below:
    def __init__(
        self,
        scheduler: Planner,
        rank: FakeRank,
        rng: random.Random,
        taken_in: dict[int, list[int]] | None = None,
        num_states: int = 0,
        *,
        forgets: float = 0.0,
    ) -> None:
        """Where sequences have states, of `num_states` blocks, `taken_in` says which tokens each block of them has taken in.
        `forgets`: how often something is given up."""
        self.scheduler, self.rank, self.rng = scheduler, rank, rng
        self.taken_in, self.num_states = {} if taken_in is None else taken_in, num_states
        self.prefix_of: dict[int, Prefix] = {-1: ("", ())}
        """By block of the pool: the salt, and all tokens up to its end."""
        self.blocks: set[Prefix] = set()
        self.states: set[Prefix] = set()
        self.under_way: list[tuple[Restore, Request, int, Callable[[bool], None]]] = []
        """Restores that are to be published, for which request, up to how many of its blocks, and who is told then."""
        self.published: list[Restore] = []
        self.num_restored = 0
        self.forgets = forgets
        self.held = (HeldCheckpoints if num_states else HeldBlocks)(scheduler.prefixes, self.has)
        self.reported: set[int] = set()
        scheduler.prefixes.on_kept(self.kept, self.checkpoint_kept)
        scheduler.prefixes.on_return(self.read)

    def has(self, digest: bytes) -> bool:
        return literal_eval(digest.decode()) in (self.states if self.num_states else self.blocks)

    @property
    def is_idle(self) -> bool:
        return not self.under_way and not self.published

    def kept(self, salt: str, parent: int, tokens: tuple[int, ...], block: int, block_hash: int) -> None:
        self.prefix_of[block] = salt, self.prefix_of[parent][1] + tokens
        if isinstance(self.held, HeldBlocks):
            self.held.kept(_named(self.prefix_of[block]), block_hash)
        assert tuple(self.rank.slots[block]) == tokens
        self.blocks.add(self.prefix_of[block])

    def checkpoint_kept(self, block: int, state: tuple[int, ...], path: Sequence[int]) -> None:
        prefix = self.prefix_of[block]
        assert [self.taken_in[part] for part in state] == [list(prefix[1])] * len(state)
        self.states.add(prefix)
        if isinstance(self.held, HeldCheckpoints):
            self.held.kept([_named(prefix)], path)

    def restore(self, request: Request) -> None:
        """Begin to restore the prefix of a request that is still to come."""
        self.read(self.scheduler.prefixes, request, lambda found: None)
        self.scheduler.check_integrity()

    def read(self, place: PrefixPlace, request: Request, then: Callable[[bool], None]) -> int:
        """An `engine.planning.prefixes.ReadBack`."""
        cached, size = place.cached_prefix(request), self.rank.size
        limit = (len(request.tokens) - 1) // size
        prefixes = [(request.salt, request.tokens[: end * size]) for end in range(limit + 1)]
        ends = [
            end
            for end in range(cached.num_usable + 1, limit + 1)
            if (not self.num_states or prefixes[end] in self.states)
            and self.blocks.issuperset(prefixes[cached.num_kept + 1 : end + 1])
        ]
        if not ends or (restore := place.begin_restore(request, end := ends[-1])) is None:
            return 0
        for number, block in enumerate(restore.blocks, len(restore.prefix)):
            self.rank.slots[block] = [*request.tokens[number * size : (number + 1) * size]]
            self.taken_in.pop(block, None)
        self.taken_in |= {part: [*request.tokens[: end * size]] for part in restore.state}
        self.under_way.append((restore, request, end, then))
        return end

    def turn(self) -> None:
        self.publish_one()
        self.end_one()
        if self.forgets and self.rng.random() < self.forgets:
            everything = sorted(self.states if self.num_states else self.blocks)
            share = 1.0 if self.rng.random() < 0.1 else 0.3
            self.forget(self.rng.sample(everything, int(len(everything) * share)))

    def forget(self, prefixes: Sequence[Prefix]) -> None:
        (self.states if self.num_states else self.blocks).difference_update(prefixes)
        for prefix in prefixes:
            self.held.gone(_named(prefix))

    def check_reports(self, ends: Sequence[Request]) -> None:
        """What was reported as held is what can be found here or below of these requests, which have all of their output."""
        if self.rng.random() < 0.1:
            self.held.replay_cache_events()
            self.reported.clear()
        come, went = self.held.drain_cache_events()
        assert self.reported.isdisjoint(come)
        assert self.reported.issuperset(went)
        assert len({*come, *went}) == len(come) + len(went)
        self.reported = self.reported.union(come).difference(went)
        there: set[int] = set()
        for request in ends:
            hashes, size = block_hashes(request.tokens, self.rank.size, request.prefix_salt), self.rank.size
            cached = self.scheduler.prefixes.cached_prefix(request)
            prefixes = [
                (request.prefix_salt, request.tokens[: end * size]) for end in range(1, len(hashes) + 1)
            ]
            if self.num_states:
                last = max(
                    (end for end, prefix in enumerate(prefixes, 1) if prefix in self.states), default=0
                )
                there.update(hashes[: max(last, cached.num_usable)])
            else:
                below = [block for block, one in zip(hashes, prefixes, strict=True) if one in self.blocks]
                there.update(hashes[: cached.num_kept], below)
        assert self.reported == there

    def publish_one(self) -> None:
        """Meanwhile others may have computed the same blocks, or restored them."""
        if not self.under_way or self.rng.random() >= 0.5:
            return
        restore, request, end, then = self.under_way.pop(self.rng.randrange(len(self.under_way)))
        is_whole = self.rng.random() < 0.8
        self.scheduler.prefixes.publish_restore(restore, len(restore.fresh) - (not is_whole))
        assert not is_whole or self.scheduler.prefixes.cached_prefix(request).num_usable >= end
        self.published.append(restore)
        self.num_restored += is_whole
        then(is_whole)
        self.scheduler.check_integrity()

    def end_one(self) -> None:
        if self.published and self.rng.random() < 0.3:
            self.scheduler.prefixes.end_restore(self.published.pop())
            self.scheduler.check_integrity()
