"""Files that are written completely or not at all, also where the disk is full or the machine crashes meanwhile."""

import contextlib
import errno
import os
import time
import uuid
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The errors of a write for which a disk, or a user's share of it, has no room."""
_DRAFT = ".new"
_ABANDONED_S = 3600.0


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` in the place of what the file has. Raises OSError, and leaves nothing then."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_DRAFT}")
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def remove_abandoned(folder: Path, suffix: str = _DRAFT) -> None:
    """Remove what processes that were killed have left half written. Files that may still be written stay."""
    before = time.time() - _ABANDONED_S
    for path in folder.glob(f"*{suffix}"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < before:
                path.unlink()


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FULL
