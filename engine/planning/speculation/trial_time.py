"""How much time trials have lost: draft tokens of which it is not known that they pay. They take a small share of all time at
most.

What a trial costs is measured, not reckoned: a draft model may have to read all that sequences have said since the last one,
which may take as long as many steps. There is no other trial until so much time has passed that the loss is a small share of it.

Invariant: the time that is owed is never negative. So what a trial has gained is not there to be lost later."""

_SHARE = 0.01
"""What trials may lose of all time."""


class TrialTime:
    def __init__(self) -> None:
        self._owed_s = 0.0

    @property
    def is_paid(self) -> bool:
        """Whether there may be another trial."""
        return self._owed_s <= 0

    def passed(self, took_s: float) -> None:
        """A step has taken so long."""
        self._owed_s = max(0.0, self._owed_s - _SHARE * took_s)

    def lost(self, lost_s: float) -> None:
        """A trial has taken so much longer than its tokens do without draft tokens; less than 0 where it has gained."""
        self._owed_s = max(0.0, self._owed_s + lost_s)
