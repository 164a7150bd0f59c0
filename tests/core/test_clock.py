"""A time that hosts can compare, and that nobody can turn back."""

import subprocess
import sys
import time

import pytest

from core.clock import WallClock, current_time


def test_another_process_says_the_same_time() -> None:
    before = current_time()
    there = subprocess.run(
        [sys.executable, "-c", "from core.clock import current_time; print(current_time())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert before - 0.5 < float(there.stdout) < current_time() + 0.5
    assert abs(current_time() - time.time()) < 60


def test_it_goes_on_when_the_hosts_time_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, before = WallClock(), current_time()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= clock.now() < before + 10
