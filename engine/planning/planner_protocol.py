"""What an engine asks of its planner, in four seams: sequences, reservations, steps and the prefix source.

One task calls all of it, and nothing here waits."""

from collections.abc import Sequence as SeqOf
from typing import Protocol

from core.cost.steps import UNKNOWN_STEPS, StepModels
from core.messages import Grant
from core.plan import StepPlan, StepResult
from core.types import Request, TokenOut
from engine.cache.radix_cache import Kept
from engine.cache.state_checkpoints import CheckpointKept
from engine.planning.planned_reservations import Reservation
from engine.planning.planner_load import PlannerLoad
from engine.planning.prefixes import Keep, PrefixPlace, ReadBack, Restore
from engine.planning.sessions import SessionCare
from engine.planning.undoing import TakenBack


class Sequences(Protocol):
    """The sequences that are computed here: they come, are held up, go on and end."""

    @property
    def stuck_pushes(self) -> list[str]:
        """The keys of pushed sequences that cannot be admitted because every block is reserved for remote writes. The instances
        that write may wait for this one in turn. Ask when `plan` has nothing and nothing is in flight."""
        ...

    def check_fits(self, request: Request) -> None:
        """Raise RequestError for a request that could never be served here."""
        ...

    def add(self, request: Request, push: Grant | None = None) -> None:
        """Compute `request` here. With `push` it samples token by token until `hold`, and its KV is sent on. Raises
        RequestError."""
        ...

    def abort(self, key: str) -> None:
        """Compute no more of it. Blocks that a pusher or a writer uses stay until they are released. Idempotent."""
        ...

    def has_room(self, key: str) -> bool:
        """Return whether a pushed sequence can sample one more token without another block. It must not wait for one, since it
        gives none back itself."""
        ...

    def hold(self, key: str) -> None:
        """Compute no more of a pushed sequence, which has sampled enough, and keep its blocks until they are released. It must be
        called before the next plan, or that samples one more token. Idempotent."""
        ...

    def go_on(self, key: str) -> None:
        """Compute a paused sequence again: nobody reads any more what its work that was taken back has written. Idempotent."""
        ...

    def mask_ready(self, key: str, num_tokens: int) -> None:
        """The sample behind this many tokens of a sequence, which a result lacks or will lack, can be made."""
        ...


class Reservations(Protocol):
    """Blocks that other instances write or read, until they are released."""

    def reserve(self, request: Request) -> Reservation | None:
        """Return blocks for all known tokens and the next one, or None while there are not enough. Raises RequestError."""
        ...

    def make_room(self, request: Request, now: float) -> bool:
        """Preempt sequences of lower classes until `request` finds blocks here. Returns False, having preempted none, if that
        does not suffice."""
        ...

    def activate(self, key: str, sampled: SeqOf[TokenOut], now: float) -> None:
        """Go on with a sequence. The reserved blocks have the KV of all known tokens and of all of `sampled` but the last."""
        ...

    def compute(self, key: str) -> None:
        """Compute the missing tokens here, since nobody will write the reserved blocks."""
        ...

    def release(self, key: str) -> None:
        """Give back a reservation, or a sequence whose blocks the pusher has read. Its users are gone. Idempotent."""
        ...


class StepPlanner(Protocol):
    """The steps that the ranks compute.

    `plan` and `commit` alternate by step. Plans are committed in their order, and at most two are uncommitted. `take_back` undoes
    those."""

    def plan(self, now: float, steps: StepModels = UNKNOWN_STEPS) -> StepPlan | None:
        """Plan the next step. Returns None when nothing can be computed now. `steps` says how long this instance's steps take."""
        ...

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenOut]:
        """Learn what `plan` has sampled. Sequences that it could not compute are aborted, before anything of them is kept."""
        ...

    def take_back(self) -> TakenBack:
        """Undo all plans that are not committed: the ranks had no memory for the first of them. Its number is planned again."""
        ...


class PrefixSource(PrefixPlace, Protocol):
    """The prefix cache, and what comes back to it from lower tiers."""

    def publish_restore(self, restore: Restore, count: int) -> None:
        """Put the first `count` of a restore's fresh blocks into the cache, with the state's checkpoint if these are all. They
        hold their KV, or will before a step reads it."""
        ...

    def end_restore(self, restore: Restore) -> None:
        """End a restore, which fills its blocks no more. Those that are not in the cache are free."""
        ...

    def on_kept(self, hear: Kept, hear_checkpoint: CheckpointKept) -> None:
        """Call `hear` with each block whose KV is complete and kept, and `hear_checkpoint` with each checkpoint of a state."""
        ...

    def on_return(self, read: ReadBack, keep: Keep | None = None) -> None:
        """Have `keep` keep the KV of preempted sequences, and `read` read it before they are computed again. Without `keep` tiers
        are taken to have it."""
        ...

    def drain_cache_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the hashes of blocks kept and given up since the last call."""
        ...

    def replay_cache_events(self) -> None:
        """Report everything that is kept as if it were new."""
        ...

    def drop_cache(self) -> int:
        """Give up every cached block that nothing here has. Returns how many those were."""
        ...


class Planner(StepPlanner, Protocol):
    """Owns an instance's blocks and sequences."""

    @property
    def sequences(self) -> Sequences: ...
    @property
    def reservations(self) -> Reservations: ...
    @property
    def prefixes(self) -> PrefixSource: ...
    @property
    def sessions(self) -> SessionCare: ...
    def load(self, now: float = 0.0, steps: StepModels = UNKNOWN_STEPS) -> PlannerLoad: ...
    def check_integrity(self) -> None:
        """Raise Bug where the sequences, the pool and the prefix cache disagree."""
        ...
