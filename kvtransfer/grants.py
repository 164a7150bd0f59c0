"""The holder's ledger of who may write which of its blocks.

Invariant: a block is in at most one live grant. A grant ends when all bytes of its writer's Commit are here, by its writer's last
message (Drained, PrefillFailed) or by a fence of the writer. Until then its blocks belong to nobody else, however long that
takes."""

from dataclasses import dataclass

from core.errors import Bug
from core.messages import Grant


@dataclass(slots=True, kw_only=True)
class LiveGrant:
    grant: Grant
    writer: str
    """Address of the prefill instance."""
    blocks: tuple[int, ...]
    """The holder's own block numbers. The grant itself has the numbers of a rank's pool."""
    arrived_bytes: int = 0
    expected_bytes: int = -1
    """-1 until the writer's Commit tells it."""


class GrantLedger:
    def __init__(self) -> None:
        self._live: dict[str, LiveGrant] = {}
        self._owner: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._live)

    def open(self, grant: Grant, writer: str, blocks: tuple[int, ...]) -> None:
        """Add a grant. Raises Bug when two grants could write one block."""
        if grant.id in self._live:
            raise Bug(f"grant {grant.id} is open already")
        for block in blocks:
            if block in self._owner:
                raise Bug(f"block {block} is granted to {self._owner[block]} and would be to {grant.id}")
        self._owner |= dict.fromkeys(blocks, grant.id)
        self._live[grant.id] = LiveGrant(grant=grant, writer=writer, blocks=blocks)

    def get(self, grant_id: str) -> LiveGrant | None:
        return self._live.get(grant_id)

    def close(self, grant_id: str) -> None:
        """End a grant: its writer will never write again. Idempotent, since a writer's last message may come more than once."""
        live = self._live.pop(grant_id, None)
        if live is not None:
            for block in live.blocks:
                del self._owner[block]

    def check_integrity(self) -> None:
        """Raise Bug where the two views differ."""
        granted = {block: live.grant.id for live in self._live.values() for block in live.blocks}
        if granted != self._owner:
            raise Bug("the grant ledger's blocks and grants disagree")
