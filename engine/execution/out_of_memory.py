"""Which steps a rank may execute behind one for which its device had no memory.

Which sequences a rank knows and what it has of them is undone by the planner, which says everything anew
(`engine/planning/undoing.py`)."""

from collections.abc import Callable
from typing import TypeVar

from core.errors import OutOfMemory
from core.plan import StepPlan

T = TypeVar("T")


class StepOrder:
    """The steps that one rank may execute. For one thread."""

    def __init__(self) -> None:
        self._failed: int | None = None
        """The last step, which has found no memory. Its number is planned again."""

    def execute(self, plan: StepPlan, do: Callable[[StepPlan], T]) -> T:
        """Return `do(plan)`. Raises OutOfMemory as `do` does, and for a step that was planned behind one that has failed."""
        if self._failed is not None and plan.step > self._failed:
            raise OutOfMemory(f"step {self._failed} before it found none")
        self._failed = None
        try:
            return do(plan)
        except OutOfMemory:
            self.failed(plan.step)
            raise

    def failed(self, step: int) -> None:
        """Take note that a step has found no memory: nothing that was planned behind it may be executed."""
        self._failed = step
