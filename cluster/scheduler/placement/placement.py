"""A request that was placed, and what it takes of its instances."""

from dataclasses import replace

from cluster.scheduler.fleet.context_forecast import Contexts
from cluster.scheduler.fleet.member import Member
from cluster.scheduler.fleet.output_lengths import RunningOutput
from cluster.scheduler.fleet.reservation import PlacementReservation
from core.messages import Finished, PlacedByPeer, PlaceRequest, ReleasedByPeer
from core.types import Route


class Placement:
    """A request that was placed and is not finished."""

    __slots__ = (
        "charged_tokens", "compute_tokens", "frontend", "moved_tokens", "num_blocks", "output", "place",
        "route", "scheduler"
    )  # fmt: skip

    def __init__(
        self,
        frontend: str,
        place: PlaceRequest,
        route: Route,
        num_blocks: int,
        *,
        compute_tokens: int,
        charged_tokens: float,
        moved_tokens: int = 0,
        scheduler: str = "",
        output: RunningOutput | None = None,
    ) -> None:
        """`compute_tokens` are those of its prompt, on the prefill instance or else on the decode instance. `charged_tokens` is
        the output that its tenant has been charged for. Its prompt takes `num_blocks`. The KV of
        `moved_tokens` goes to the decode instance. `scheduler` has placed it; empty means this one. `output` learns how long it
        becomes."""
        self.frontend, self.place, self.route, self.scheduler = frontend, place, route, scheduler
        self.num_blocks, self.compute_tokens, self.charged_tokens = num_blocks, compute_tokens, charged_tokens
        self.moved_tokens, self.output = moved_tokens, output

    def told_by(self, scheduler: str) -> PlacedByPeer:
        """Return what the scheduler that has placed it tells the others."""
        return PlacedByPeer(
            scheduler=scheduler,
            frontend=self.frontend,
            place=replace(self.place, block_hashes=()),
            route=self.route,
            num_blocks=self.num_blocks,
            compute_tokens=self.compute_tokens,
            expected_tokens=self.charged_tokens,
            moved_tokens=self.moved_tokens,
        )

    def released_by(self, scheduler: str, ended: Finished | None) -> ReleasedByPeer:
        """Return what the scheduler that has placed it tells the others at its end."""
        return ReleasedByPeer(
            scheduler=scheduler,
            request_id=self.place.request_id,
            attempt=self.place.attempt,
            num_output_tokens=0 if ended is None else ended.num_output_tokens,
            complete=ended is not None and ended.complete,
        )

    def charge_at_least(self, num_output: int) -> float:
        """Return what of so much output is to be charged yet, and count it as charged."""
        more = max(0.0, num_output - self.charged_tokens)
        self.charged_tokens += more
        return more


def decode_reservation(
    now: float, placed: Placement, contexts: Contexts, *, late: bool = False
) -> PlacementReservation:
    """Return what a request takes of its decode instance, which computes the prompt where no other one does."""
    place = placed.place
    return PlacementReservation(
        now,
        0 if place.ends_with_prompt else 1,
        placed.num_blocks,
        0 if placed.route.prefill else placed.compute_tokens,
        hashes=place.block_hashes,
        contexts=contexts,
        tpot_s=place.slo.tpot_s,
        level=place.slo.priority,
        late=late,
    )


def prefill_reservation(
    now: float, placed: Placement, receiver: Member | None, *, late: bool = False
) -> PlacementReservation:
    """Return what computing a prompt takes of the instance that sends its KV to `receiver`."""
    return PlacementReservation(
        now,
        0,
        0,
        placed.compute_tokens,
        hashes=(),
        level=placed.place.slo.priority,
        late=late,
        receiver=placed.route.decode,
        sent_bytes=0 if receiver is None else placed.moved_tokens * receiver.kv_token_bytes,
    )
