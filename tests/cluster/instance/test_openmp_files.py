"""What OpenMP leaves of processes that were killed is removed, and nothing else is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.instance.openmp_files import remove_openmp_files


def test_registrations_of_dead_processes_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    uid = os.getuid()
    gone = [f"__KMP_REGISTERED_LIB_{ended.pid}_{uid}", f"__KMP_REGISTERED_LIB_{ended.pid}"]
    stays = [
        f"__KMP_REGISTERED_LIB_{os.getpid()}_{uid}",
        "__KMP_REGISTERED_LIB_x",
        "__KMP_other_1",
        "baton-1",
    ]
    for name in (*gone, *stays):
        (tmp_path / name).touch()
    remove_openmp_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stays)


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes another user's file")
def test_anothers_stay(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path = tmp_path / f"__KMP_REGISTERED_LIB_{ended.pid}_65534"
    path.touch()
    os.chown(path, 65534, 65534)
    remove_openmp_files(tmp_path)
    assert path.exists()
