"""What Ray leaves in the temporary folder, and what of it Baton takes away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.deploy.session_folder import claim, remove, remove_abandoned


@pytest.fixture
def dead() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def session(root: Path, when: str, pid: int, claimed: bool = True) -> Path:
    folder = root / f"session_{when}_{pid}"
    (folder / "logs").mkdir(parents=True)
    if claimed:
        claim(folder)
    return folder


def test_killed_servers_leave_no_more_than_one_folder(tmp_path: Path, dead: int) -> None:
    session(tmp_path, "2026-01-01_10-00-00_000001", dead)
    session(tmp_path, "2026-01-01_11-00-00_000001", dead)
    newest = session(tmp_path, "2026-01-02_09-00-00_000001", dead)
    running = session(tmp_path, "2026-01-01_09-00-00_000001", os.getpid())
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([newest, running])


def test_what_baton_has_not_started_stays(tmp_path: Path, dead: int) -> None:
    others = [session(tmp_path, f"2026-01-0{day}_10-00-00_000001", dead, claimed=False) for day in (1, 2)]
    session(tmp_path, "2026-01-03_10-00-00_000001", dead)
    remove_abandoned(tmp_path)
    assert [folder for folder in others if not folder.exists()] == []


def test_a_removed_session_is_not_the_latest_any_more(tmp_path: Path, dead: int) -> None:
    mine, other = (session(tmp_path, f"2026-01-0{day}_10-00-00_000001", dead) for day in (1, 2))
    latest = tmp_path / "session_latest"
    latest.symlink_to(mine)
    remove(other)
    assert latest.exists()
    remove(mine)
    assert list(tmp_path.iterdir()) == []
