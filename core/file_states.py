"""Says of files whether they have changed. Files that an orchestrator mounts change by a swapped link somewhere above them, which
no watch on the file itself reports: so they are looked at now and then."""

import os
from collections.abc import Iterable

FileStates = dict[str, tuple[int, int, int] | None]


def file_states(files: Iterable[str]) -> FileStates:
    """Return what differs where a file has changed, by file; None for one that is not there."""
    found: FileStates = {}
    for file in files:
        try:
            state = os.stat(file)
            found[file] = (state.st_ino, state.st_size, state.st_mtime_ns)
        except OSError:
            found[file] = None
    return found
