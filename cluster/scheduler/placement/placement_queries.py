"""Asks for a place: a request together with how long its output will be, as far as outputs like it are known."""

from math import inf
from typing import Final

from cluster.scheduler.fleet.member import CachedBlocks
from cluster.scheduler.fleet.output_lengths import OutputLengths
from cluster.scheduler.placement.placement_policy import PlacementQuery
from core.messages import Place

GROWTH_TOKENS: Final = 256
"""The room that is kept for a sequence's output while nothing is known of how long outputs are."""
GROWTH_SHARE: Final = 0.75
"""Room is kept for what this share of the outputs needs. Longer ones rely on others ending before."""
SHORT_SHARE: Final = 0.05
"""The share of outputs that are shorter than the one over which a wait before the second token is taken to be spread."""


class PlacementQueries:
    def __init__(self) -> None:
        self._lengths = OutputLengths()

    @property
    def mean_output_tokens(self) -> float:
        """The mean of all outputs; infinite until it is known."""
        return self._lengths.mean("", "") or inf

    def observe(self, place: Place, num_output_tokens: int) -> None:
        """Learn that a request has ended after so many output tokens."""
        self._lengths.observe(place.tenant, place.slo.name, num_output_tokens)

    def growth_tokens(self, place: Place) -> int:
        """Return the output tokens that room is kept for."""
        usual = self._lengths.quantile(place.tenant, place.slo.name, GROWTH_SHARE)
        return min(place.max_new_tokens, GROWTH_TOKENS if usual is None else usual)

    def of(
        self,
        place: Place,
        cached: CachedBlocks,
        due_at: float = inf,
        missing_tokens: int | None = None,
        *,
        late: bool = False,
    ) -> PlacementQuery:
        lengths, tenant, name, most = self._lengths, place.tenant, place.slo.name, place.max_new_tokens
        mean, short = lengths.mean(tenant, name), lengths.quantile(tenant, name, SHORT_SHARE)
        return PlacementQuery(
            place.num_tokens,
            self.growth_tokens(place),
            cached,
            missing_tokens,
            slo=place.slo,
            due_at=due_at,
            expected_tokens=min(most, GROWTH_TOKENS if mean is None else mean),
            short_tokens=min(most, GROWTH_TOKENS if short is None else short),
            late=late,
        )
