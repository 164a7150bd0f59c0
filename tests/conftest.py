"""For all tests: which of them share a worker, and in which order they run."""

import gc
import os
import signal
import sys
from collections.abc import Generator
from importlib import import_module
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from kernels.cpu import library
from tests.turns import left_out

# A shell starts background jobs with SIGINT ignored, and the programs that tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Hundreds of processes import the same thousands of modules. Where bytecode must not be written, as images often say, each of them
# compiles them again, which is half of what its start takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Ray runs its workers at niceness 15 by default: tests of the other worker would come before all they do, for minutes.
os.environ.setdefault("RAY_worker_niceness", "0")

# What tokens are compared with is transformers' float32, so no row is rounded to bfloat16 where a test does not ask for it.
os.environ.setdefault("BATON_MAX_CPU_ISA", "avx512")

# Two workers and what they start share the cores: threads that wait for each other's turns there are many times slower than one.
os.environ.setdefault("BATON_MAX_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests that ask for tiles have them on every processor with the vectors beside them.
os.environ.setdefault("BATON_EMULATE_TILES", "1")

# How long an example takes is the business of a machine that others share.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")

_OWN_THE_MACHINE = (
    "tests/chaos/",
    "tests/deploy/",
    "tests/charts/test_on_ray.py",
    "tests/charts/test_prestop.py",
    "tests/e2e/test_hosts.py",
)
"""Tests that stop, cut and restart real processes under deadlines, or make networks of their own: one after another."""
_ONE_SERVER = "tests/cluster/ingress/observability/"
"""Files of tests that look at one server."""
_NOTHING_SHARED = (
    "tests/benchmarks/test_smoke.py",
    "tests/engine/sizing/test_devices.py",
    "tests/kernels/test_triton_aot.py",
    "tests/kernels/test_triton_interpreted.py",
    "tests/kernels/triton/",
    "tests/parallel/test_served_grid.py",
)
"""Tests that take long and share no fixture: each goes to the worker that is free."""


class _ByFile(LoadScopeScheduling):
    """Tests of a file share its fixtures, and so a worker."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_OWN_THE_MACHINE):
            return "the machine"
        if nodeid.startswith(_ONE_SERVER):
            return _ONE_SERVER
        return nodeid if nodeid.startswith(_NOTHING_SHARED) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests begin first, so that no worker is left with one at the end. A file's tests stay together."""
    left = left_out(items, config.args)
    if left:
        config.hook.pytest_deselected(items=[*left])
    items[:] = [item for item in items if item not in left]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say whether kernels by tiles ran on a processor's own ones."""
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    if any(getattr(report, "nodeid", "").startswith("tests/kernels/cpu/") for report in reports):
        terminalreporter.write_line(f"tiles (AMX): {library.tiles()}")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked, and not started from nothing."""
    start_forked = import_module("tests.parallel.forked_ranks").start_forked
    monkeypatch.setattr("engine.ranks.child_ranks.start_children", start_forked)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No collection of garbage looks at modules and tests, which live to the end: that takes a second each time, and a fifth of the
    time in which they come."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
