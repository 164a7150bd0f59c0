"""The seam between the scheduler and its placement policies: what a policy is asked, and what it answers."""

from collections.abc import Sequence
from math import inf
from typing import Protocol

from cluster.scheduler.fleet.context_forecast import NO_CONTEXTS, Contexts
from cluster.scheduler.fleet.member import CachedBlocks, Member
from core.types import STANDARD, Slo


class PlacementQuery:
    """A request as a policy sees it. Never changed (a dataclass takes ten times as long to make, compiled)."""

    __slots__ = (
        "cached_blocks", "contexts", "due_at", "expected_tokens", "late", "leaves", "missing_tokens", "num_tokens",
        "short_tokens", "slo", "tpot_s",
    )  # fmt: skip

    def __init__(
        self,
        num_tokens: int,
        cached_blocks: CachedBlocks,
        missing_tokens: int | None = None,
        *,
        slo: Slo = STANDARD,
        due_at: float = inf,
        contexts: Contexts = NO_CONTEXTS,
        expected_tokens: float = 256.0,
        short_tokens: float = 256.0,
        late: bool = False,
        leaves: float = 0.0,
    ) -> None:
        """`missing_tokens` is what the decode instance lacks, where it has said so itself. `due_at` is when the first token is
        due. `contexts` are the tokens that its sequence will hold, `expected_tokens` is the average output, and `short_tokens` a
        short one. `late` says that it misses its first token, and lets others pass on its instance. It `leaves` others such a
        share of what an instance can decode."""
        self.num_tokens, self.missing_tokens, self.contexts = num_tokens, missing_tokens, contexts
        self.cached_blocks = cached_blocks
        self.slo, self.tpot_s, self.due_at = slo, slo.tpot_s, due_at
        self.expected_tokens, self.short_tokens = expected_tokens, short_tokens
        self.late, self.leaves = late, leaves

    def uncached(self, member: Member) -> int:
        """Return the tokens to compute on `member`. The last one is always computed, since its logits are needed."""
        num_blocks = self.cached_blocks.get(member.address, 0)
        return max(1, self.num_tokens - num_blocks * member.block_size)

    def to_move(self, decode: Member) -> int:
        """Return the number of tokens whose KV must reach `decode`."""
        return self.uncached(decode) if self.missing_tokens is None else self.missing_tokens


class PlacementChoice:
    """A place. With `prefill` None the decode instance computes the prompt itself. `late` says that it misses a target there."""

    __slots__ = ("cost_s", "decode", "instead", "late", "prefill")

    def __init__(self, decode: Member, prefill: Member | None, cost_s: float, *, late: bool = False) -> None:
        self.decode, self.prefill, self.cost_s, self.late = decode, prefill, cost_s, late
        self.instead: PlacementChoice | None = None
        """What a shadow tuning would choose, where there is one (`shadow_policy`)."""

    @property
    def computes(self) -> Member:
        return self.prefill or self.decode

    @property
    def words(self) -> str:
        """The place as a line of the decision log names it."""
        return f"{self.prefill.address if self.prefill else 'local'} {self.decode.address}"


class View:
    """The instances that have blocks for a request, seen without classes below `level`, and the policy's choice among them."""

    __slots__ = ("choice", "decodes", "level")

    def __init__(self, decodes: Sequence[Member], level: int) -> None:
        self.decodes, self.level = decodes, level
        self.choice: PlacementChoice | None = None


class PlacementPolicy(Protocol):
    """Decides where a request should run. The scheduler has made sure that every one of `decodes` has headroom for it."""

    def choose(
        self, ask: PlacementQuery, decodes: Sequence[Member], prefills: Sequence[Member], now: float
    ) -> PlacementChoice | None:
        """Return the best place, or None to wait. The place may have to finish other prompts first; then the request waits for
        it."""
        ...

    def choose_prefill(
        self, ask: PlacementQuery, decode: Member, prefills: Sequence[Member], now: float
    ) -> PlacementChoice:
        """Return where a request that already holds its blocks on `decode` gets its prompt computed."""
        ...

    def has_prompt_room(self, member: Member, *, late: bool, timed: bool) -> bool:
        """Return whether the instance should be given another prompt, `late` or not, already. If not, the request waits and can
        still go elsewhere. `timed`: its class names a target for the first token."""
        ...

    def least_work_s(self, ask: PlacementQuery, members: Sequence[Member]) -> float:
        """Return the least time that its prompt takes, without any queue."""
        ...

    def measured(self, member: Member) -> None:
        """Note that `member` has a new report."""
        ...
