"""A step while it is being planned. Owned by StepScheduler."""

from dataclasses import dataclass, field

from core.plan import BlockCopy, NewSeq, SeqWork, StepPlan


@dataclass(slots=True, kw_only=True)
class StepBuilder:
    step: int
    budget: int
    """The number of tokens that the step may still compute."""
    new: list[NewSeq] = field(default_factory=list[NewSeq])
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])
    work: list[SeqWork] = field(default_factory=list[SeqWork])
    adapters: list[str] = field(default_factory=list[str])
    """The adapter of each work's sequence; empty where it has none."""

    def add(self, work: SeqWork, adapter: str) -> None:
        self.work.append(work)
        self.adapters.append(adapter)
        self.budget -= work.count

    def num_computed_before(self, key: str, planned: int) -> int:
        """How many of the `planned` tokens of a sequence the steps before this one compute."""
        return next((work.start for work in self.work if work.key == key), planned)

    def plan(self, drop: tuple[str, ...]) -> StepPlan:
        return StepPlan(
            step=self.step,
            new=tuple(self.new),
            copies=tuple(self.copies),
            work=self._side_by_side(),
            drop=drop,
        )

    def _side_by_side(self) -> tuple[SeqWork, ...]:
        """Return the work with that of each adapter in one run: then no rows are gathered for its products."""
        if not any(self.adapters):
            return tuple(self.work)
        order = sorted(range(len(self.work)), key=self.adapters.__getitem__)
        return tuple(self.work[place] for place in order)
