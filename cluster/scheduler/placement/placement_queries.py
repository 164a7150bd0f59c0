"""Asks for a place: a request together with how long its output will be, as far as outputs like it are known."""

from math import inf

from cluster.scheduler.fleet.context_forecast import NO_CONTEXTS, Contexts, even, forecast
from cluster.scheduler.fleet.length_curve import LengthCurve
from cluster.scheduler.fleet.member import CachedBlocks
from cluster.scheduler.fleet.output_lengths import OutputLengths, RunningOutput
from cluster.scheduler.placement.placement_policy import PlacementQuery
from core.messages import PlaceRequest
from core.scheduler_tuning import SchedulerTuning


class PlacementQueries:
    def __init__(self, tuning: SchedulerTuning) -> None:
        self._lengths, self._tuning = OutputLengths(tuning), tuning

    @property
    def mean_output_tokens(self) -> float:
        """The mean of all outputs; infinite until some have ended."""
        is_known = self._lengths.num_ended >= self._tuning.enough_outputs
        return self._lengths.curve("", "").mean if is_known else inf

    def begin(self, place: PlaceRequest) -> RunningOutput | None:
        """Return what is to be told of the output of a request that was placed. None where nothing can be learned from it: it
        ends with its prompt, or has begun elsewhere."""
        if place.ends_with_prompt or place.attempt:
            return None
        return self._lengths.begin(place.tenant, place.slo.name)

    def contexts(self, place: PlaceRequest, num_output: int = 0) -> Contexts:
        """Return what its sequence holds and will hold once it has come to so much output."""
        return self._contexts(place, self._lengths.curve(place.tenant, place.slo.name), num_output)

    def of(
        self,
        place: PlaceRequest,
        cached: CachedBlocks,
        due_at: float = inf,
        missing_tokens: int | None = None,
        *,
        late: bool = False,
        leaves: float = 0.0,
    ) -> PlacementQuery:
        curve, most = self._lengths.curve(place.tenant, place.slo.name), place.max_new_tokens
        return PlacementQuery(
            place.num_tokens,
            cached,
            missing_tokens,
            slo=place.slo,
            due_at=due_at,
            contexts=self._contexts(place, curve),
            expected_tokens=min(most, curve.mean),
            short_tokens=min(most, curve.quantile(self._tuning.short_share)),
            late=late,
            leaves=leaves,
        )

    def _contexts(self, place: PlaceRequest, curve: LengthCurve, num_output: int = 0) -> Contexts:
        """Return what a sequence with outputs of that distribution holds and will hold; nothing where it ends with its prompt."""
        if place.ends_with_prompt:
            return NO_CONTEXTS
        if not self._tuning.foresees_contexts:
            return even(place.num_tokens + num_output)
        return forecast(curve, place.num_tokens, num_output, place.max_new_tokens, self._tuning.chance)
