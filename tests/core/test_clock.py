"""A time that hosts can compare, and that nobody can turn back."""

import subprocess
import sys
import time

import pytest

from core.clock import WallClock, now_s


def test_another_process_says_the_same_time() -> None:
    before = now_s()
    there = subprocess.run(
        [sys.executable, "-c", "from core.clock import now_s; print(now_s())"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert before - 0.5 < float(there.stdout) < now_s() + 0.5
    assert abs(now_s() - time.time()) < 60


def test_it_goes_on_when_the_hosts_time_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, before = WallClock(), now_s()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert before <= clock.now() < before + 10
