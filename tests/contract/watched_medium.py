"""A medium whose intakes a test reaches, and after whose fetches it may damage what has come."""

from collections.abc import Callable, Sequence

from kvtransfer.copies import CopyRun
from kvtransfer.transport.pull import Exchange, Intake, Medium, Outlet


class WatchedMedium:
    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.name, self.host, self.needs_go = medium.name, medium.host, medium.needs_go
        self.num_bytes, self.memory = medium.num_bytes, medium.memory
        self.intakes: list[Intake] = []
        self.fetched: Callable[[Sequence[CopyRun]], None] = lambda _: None
        """Called after each fetch, on its thread."""

    def take(self, exchange: Exchange) -> Intake:
        self.intakes.append(_WatchedIntake(self, self.medium.take(exchange)))
        return self.intakes[-1]

    def give(self, exchange: Exchange) -> Outlet:
        return self.medium.give(exchange)

    def close(self) -> None:
        self.medium.close()


class _WatchedIntake:
    def __init__(self, medium: WatchedMedium, intake: Intake) -> None:
        self._medium, self._fetch = medium, intake.fetch
        self.abort, self.close = intake.abort, intake.close

    def fetch(self, runs: Sequence[CopyRun], *, scratch: bool) -> None:
        self._fetch(runs, scratch=scratch)
        self._medium.fetched(runs)
