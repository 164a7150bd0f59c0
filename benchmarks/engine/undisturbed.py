"""What a benchmark's engine never tells it: that something has gone wrong with its requests."""

from collections.abc import Sequence

from core.plan import FailedSeq


class Undisturbed:
    """A part of core.ports.EngineEvents. Requests are sent on to nobody and have no images."""

    def on_stuck(self, keys: list[str]) -> None:
        raise AssertionError(f"{keys} are stuck")

    def on_taken_back(self, paused: list[str], lost: list[str]) -> None:
        raise AssertionError(f"nothing sends {paused} and {lost} on")

    def on_failed(self, failed: Sequence[FailedSeq]) -> None:
        raise AssertionError(f"{failed} have no images")
