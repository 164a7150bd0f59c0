"""The folders that Ray makes for its sessions in the temporary folder, and never removes."""

import re
import shutil
from pathlib import Path

_MARK = "baton-serve"
"""A file in a session's folder: Baton has started it."""
_NAME = re.compile(r"session_.*_(\d+)")
"""The name of a session's folder, which ends with the id of the process that has started the session."""


def claim(session: Path) -> None:
    (session / _MARK).touch()


def remove(session: Path) -> None:
    latest = session.parent / "session_latest"
    if latest.is_symlink() and latest.resolve() == session.resolve():
        latest.unlink(missing_ok=True)
    shutil.rmtree(session, ignore_errors=True)


def remove_abandoned(root: Path) -> None:
    """Remove the claimed sessions in `root` whose process was killed. The newest stays, because its logs may say why."""
    abandoned = sorted(folder for folder in root.glob("session_*") if _is_abandoned(folder))
    for session in abandoned[:-1]:
        remove(session)


def _is_abandoned(session: Path) -> bool:
    name = _NAME.fullmatch(session.name)
    return name is not None and (session / _MARK).exists() and not Path("/proc", name[1]).exists()
