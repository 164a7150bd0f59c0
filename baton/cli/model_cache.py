"""Models on this host's disk: pulled, with bars on a terminal and plain lines elsewhere; listed; removed."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

from pydantic import ByteSize
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from models.files.pulled_models import PulledModels
from models.pulling.pull import Pull, PullProgress, Tell, read_bytes

_LINE_EVERY_S = 5.0


def pull(name: str, *, sha256: str, max_bytes: str) -> None:
    """Pull a model, and say how far it is. Raises ConfigError."""
    console = Console(highlight=False)
    limit = read_bytes(max_bytes, "--max-bytes") if max_bytes else None
    with _shown(console) as tell:
        folder = Pull(PulledModels(), tell, max_bytes=limit, sha256=sha256).run(name)
    console.print(f"{name} is in {folder}", soft_wrap=True, markup=False)


def remove(name: str) -> None:
    """Remove a pulled model that nobody uses. Raises ConfigError."""
    Console(highlight=False).print(f"removed {name}: {_size(PulledModels().remove(name))}", markup=False)


def cached() -> Table:
    """Return what is in the cache, the most recently used first."""
    table = Table("name", "size", "last used", "state", box=None, pad_edge=False)
    for each in PulledModels().cached():
        ago = timedelta(seconds=int(time.time() - each.used_at))
        state = "in use" if each.is_used else "whole" if each.model.is_whole else "half: pull it again"
        table.add_row(escape(each.model.name), _size(each.num_bytes), f"{ago} ago", state)
    return table


@contextmanager
def _shown(console: Console) -> Generator[Tell]:
    if not console.is_terminal:
        yield _Lines(console).tell
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console) as bars:
        yield _Bars(bars).tell


class _Bars:
    """A bar for each file."""

    def __init__(self, bars: Progress) -> None:
        self._bars, self._tasks = bars, dict[str, TaskID]()

    def tell(self, progress: PullProgress) -> None:
        path, completed = progress.path, progress.completed
        if not path:
            self._bars.console.print(progress.status, markup=False)
        elif path in self._tasks:
            self._bars.update(self._tasks[path], completed=completed)
        else:
            self._tasks[path] = self._bars.add_task(escape(path), total=progress.total, completed=completed)


class _Lines:
    """A line for each file that is whole, and now and then one for what is on its way."""

    def __init__(self, console: Console) -> None:
        self._console, self._told_at = console, time.monotonic()

    def tell(self, progress: PullProgress) -> None:
        now = time.monotonic()
        if not progress.path:
            line = progress.status
        elif progress.completed == progress.total or now - self._told_at >= _LINE_EVERY_S:
            self._told_at = now
            line = f"{progress.path} {_size(progress.completed)} of {_size(progress.total)}"
        else:
            return
        self._console.print(line, markup=False, soft_wrap=True)


def _size(num_bytes: int) -> str:
    return ByteSize(num_bytes).human_readable(decimal=True, separator=" ")
