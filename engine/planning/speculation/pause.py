"""How long nothing is proposed where draft tokens do not pay: ever longer, up to a bound."""

_LONGEST = 64
_LONGEST_WITHOUT_DRAFTS = 4
"""Steps where there was nothing to propose from: the text may repeat itself soon."""


class Pause:
    def __init__(self) -> None:
        self._left, self._next = 0, 1

    @property
    def is_over(self) -> bool:
        return self._left <= 0

    @property
    def is_longest(self) -> bool:
        """Whether what is tried now has not paid for long."""
        return self._next == _LONGEST

    def passed(self) -> None:
        """A step has passed."""
        self._left -= 1

    def rest(self, num_steps: int) -> None:
        """Begin a pause that says nothing of whether draft tokens pay."""
        self._left = num_steps

    def tried(self, *, any_found: bool, any_chosen: bool) -> None:
        """End the pause where something was chosen, else begin one that is no shorter than the last: what cannot be proposed yet
        says nothing of whether draft tokens pay."""
        if any_chosen:
            self._left, self._next = 0, 1
            return
        self._left = self._next
        longest = _LONGEST if any_found else max(_LONGEST_WITHOUT_DRAFTS, self._next)
        self._next = min(longest, 2 * self._next)
