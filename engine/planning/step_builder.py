"""A step while it is being planned. Owned by StepScheduler."""

from dataclasses import dataclass, field
from operator import attrgetter

from core.plan import BlockCopy, NewSeq, SeqWork, StepPlan


@dataclass(slots=True, kw_only=True)
class StepBuilder:
    step: int
    now: float
    """When it is planned."""
    budget: int
    """The number of tokens that the step may still compute."""
    most_whole: int = 0
    """The tokens that the next work may have beyond it where it cannot be cut."""
    new: list[NewSeq] = field(default_factory=list[NewSeq])
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])
    work: list[SeqWork] = field(default_factory=list[SeqWork])

    def add(self, work: SeqWork) -> None:
        self.work.append(work)
        self.budget -= work.count
        self.most_whole = 0

    def num_computed_before(self, key: str, planned: int) -> int:
        """How many of the `planned` tokens of a sequence the steps before this one compute."""
        return next((work.start for work in self.work if work.key == key), planned)

    def plan(self, drop: tuple[str, ...]) -> StepPlan:
        """Return the plan. The work of each adapter is one run: then no rows are gathered for its products."""
        return StepPlan(
            step=self.step,
            new=tuple(self.new),
            copies=tuple(self.copies),
            work=tuple(sorted(self.work, key=attrgetter("adapter"))),
            drop=drop,
        )
