"""Removes what OpenMP leaves in /dev/shm: a process registers there, and one that is killed never takes it back."""

import contextlib
import os
import re
from pathlib import Path

_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"__KMP_REGISTERED_LIB_(\d+)(_\d+)?")


def remove_openmp_files(folder: Path = _FOLDER, processes: Path = Path("/proc")) -> None:
    """Remove the registrations of this user's dead processes. `folder` and `processes` are for tests."""
    for path in folder.glob("__KMP_REGISTERED_LIB_*"):
        named = _NAME.fullmatch(path.name)
        if named is None or (processes / named[1]).exists():
            continue
        with contextlib.suppress(OSError):  # another process may be faster
            if path.stat().st_uid == os.getuid():
                path.unlink()
