"""How long a step may take before it counts as hung: a bound that an instance learns from its own steps.

Steps grow at most in proportion (`core.cost.steps`): k times the tokens, contexts, sequences and pairs take at most k times as
long. So the longest of recent steps and the largest sizes among them bound every other step. Each of the four sizes may come from
another step, hence the factor of four. With it no step that keeps to such a step-time model is ever late, whatever the four
coefficients are.

Recent means the last one or two windows of steps: a step that was held up for long is forgotten, and so is a size."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from core.cost.steps import StepModels
from core.plan import StepPlan
from engine.planning.step_time_fit import expected_s

PATIENCE = 12.0
"""A step that is less known, or waits for others, may take so many times the grace."""
UNSEEN_S = 600.0
"""Nothing is known of the first steps. They have as long as ranks have for their start."""
YOUNG_STEPS = 20
"""Fewer steps of one kind say less than all kinds together do. Until then kernels may still be compiled."""
WINDOW = 256
_NUM_SIZES = 4.0

_Kind = Literal["decode", "prompt", "images"]
_Sizes = tuple[float, float, float, float]
_NO_SIZES: _Sizes = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Seen:
    """The largest of each size, and the longest duration, of some steps."""

    num_steps: int = 0
    longest_s: float = 0.0
    sizes: _Sizes = _NO_SIZES

    def with_(self, other: "_Seen") -> "_Seen":
        a, b = self.sizes, other.sizes
        largest = max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])
        return _Seen(self.num_steps + other.num_steps, max(self.longest_s, other.longest_s), largest)

    def in_proportion_s(self, sizes: _Sizes) -> float:
        """Return the longest duration, scaled to a larger step; infinite where a size was never seen."""
        factor = 1.0
        for size, largest in zip(sizes, self.sizes, strict=True):
            if size > largest:
                if not largest:
                    return inf
                factor = max(factor, size / largest)
        return factor * self.longest_s if self.num_steps else inf


_NOTHING = _Seen()


class _Recent:
    """The last steps of one kind: at least as many as a window has, and at most twice as many."""

    def __init__(self) -> None:
        self._old = self._new = _NOTHING
        self.num_steps = 0

    def add(self, step: _Seen) -> None:
        if self._new.num_steps == WINDOW:
            self._old, self._new = self._new, _NOTHING
        self._new = self._new.with_(step)
        self.num_steps += 1

    @property
    def seen(self) -> _Seen:
        return self._old.with_(self._new)


class StepBounds:
    def __init__(self, grace_s: float, *, compiles: bool = False) -> None:
        """`grace_s`: what every step may take beyond what was learned. `compiles`: kernels are compiled when steps first use
        them."""
        self._grace_s, self._compiles = grace_s, compiles
        self._recent: dict[_Kind, _Recent] = {kind: _Recent() for kind in ("decode", "prompt", "images")}

    def bound_s(self, plan: StepPlan, steps: StepModels) -> float:
        """Return how long a step may take. `steps` predict it, if they know anything of such steps."""
        is_predicted = (steps.prompt if plan.size.num_prompt else steps.decode).num_steps > 0
        predicted_s = expected_s(plan, steps) if is_predicted else 0.0
        kind, own = _kind_of(plan), self._recent[_kind_of(plan)]
        is_young = own.num_steps < YOUNG_STEPS
        likely_s = (self._all if is_young else own.seen).in_proportion_s(_sizes_of(plan))
        is_unseen = likely_s == inf
        if is_unseen and not is_predicted:
            return max(UNSEEN_S, PATIENCE * self._grace_s)
        # How long an image takes depends on more than its tokens.
        is_known = not is_unseen and kind != "images" and not (is_young and self._compiles)
        longest_s = predicted_s if is_unseen else max(likely_s, predicted_s)
        return (1.0 if is_known else PATIENCE) * self._grace_s + _NUM_SIZES * longest_s

    def observe(self, plan: StepPlan, duration_s: float) -> None:
        """Learn that a step has ended after `duration_s`."""
        self._recent[_kind_of(plan)].add(_Seen(1, duration_s, _sizes_of(plan)))

    @property
    def _all(self) -> _Seen:
        found = _NOTHING
        for recent in self._recent.values():
            found = found.with_(recent.seen)
        return found


def _kind_of(plan: StepPlan) -> _Kind:
    if not plan.size.num_prompt:
        return "decode"
    return "images" if any(work.has_image for work in plan.work) else "prompt"


def _sizes_of(plan: StepPlan) -> _Sizes:
    size = plan.size
    return size.num_tokens, size.num_context, len(plan.work), size.num_pairs
