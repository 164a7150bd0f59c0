"""Asks for a place: a request together with how long its output will be, as far as outputs like it are known."""

from math import inf
from typing import Final

from cluster.scheduler.fleet.length_curve import LengthCurve
from cluster.scheduler.fleet.member import CachedBlocks
from cluster.scheduler.fleet.output_lengths import OutputLengths, RunningOutput
from cluster.scheduler.placement.placement_policy import PlacementQuery
from core.messages import Place

GROWTH_SHARE: Final = 0.75
"""Room is kept for what this share of the outputs needs. Longer ones rely on others ending before."""
SHORT_SHARE: Final = 0.05
"""The share of outputs that are shorter than the one over which a wait before the second token is taken to be spread."""
_ENOUGH: Final = 20
"""The outputs that must have ended before slots are foreseen to come free."""


class PlacementQueries:
    def __init__(self) -> None:
        self._lengths = OutputLengths()

    @property
    def mean_output_tokens(self) -> float:
        """The mean of all outputs; infinite until some have ended."""
        return self._lengths.curve("", "").mean if self._lengths.num_ended >= _ENOUGH else inf

    def begin(self, place: Place) -> RunningOutput | None:
        """Return what is to be told of the output of a request that was placed. None where nothing can be learned from it: it
        ends with its prompt, or has begun elsewhere."""
        if place.ends_with_prompt or place.attempt:
            return None
        return self._lengths.begin(place.tenant, place.slo.name)

    def growth_tokens(self, place: Place) -> int:
        """Return the output tokens that room is kept for."""
        return _growth_tokens(place, self._lengths.curve(place.tenant, place.slo.name))

    def of(
        self,
        place: Place,
        cached: CachedBlocks,
        due_at: float = inf,
        missing_tokens: int | None = None,
        *,
        late: bool = False,
    ) -> PlacementQuery:
        curve, most = self._lengths.curve(place.tenant, place.slo.name), place.max_new_tokens
        return PlacementQuery(
            place.num_tokens,
            _growth_tokens(place, curve),
            cached,
            missing_tokens,
            slo=place.slo,
            due_at=due_at,
            expected_tokens=min(most, curve.mean),
            short_tokens=min(most, curve.quantile(SHORT_SHARE)),
            late=late,
        )


def _growth_tokens(place: Place, curve: LengthCurve) -> int:
    return min(place.max_new_tokens, curve.quantile(GROWTH_SHARE))
