"""Processes that tests look at, which may end meanwhile."""

from contextlib import suppress
from pathlib import Path

import psutil


def command(process: psutil.Process) -> list[str]:
    """Return its words; none if it has ended."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def children(*words: str) -> list[psutil.Process]:
    """Return the children of this process that were started with these words among others, in the order in which they were
    started."""
    found: list[tuple[float, psutil.Process]] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if {*words} <= {*command(child)}:
                found.append((child.create_time(), child))
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


def is_running(pid: int) -> bool:
    """Return whether the process has not ended. One that nobody has waited for yet has."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def in_use(path: Path) -> bool:
    """Return whether any process that may be looked at has opened or mapped this file."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(path) in (process / "maps").read_text():
                return True
            if any(str(descriptor.readlink()) == str(path) for descriptor in (process / "fd").iterdir()):
                return True
    return False
