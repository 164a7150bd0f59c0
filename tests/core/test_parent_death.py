"""A child whose parent dies ends, also one that was still importing then."""

import os
import subprocess
import sys
import time

import pytest

from tests.patience import PATIENCE_S
from tests.processes import is_running

CHILD = """
    import contextlib, sys, time
    time.sleep(float(sys.argv[1]))  # as imports would
    from core.parent_death import die_with_parent
    die_with_parent()
    with contextlib.suppress(BrokenPipeError):  # as a rank says nothing while it looks for the others
        print("lives", flush=True)
    time.sleep(1000)
"""
PARENT = """
    import subprocess, sys
    from core.parent_death import child_environment
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], env=child_environment({}))
    print(child.pid, flush=True)
    child.wait()
"""


def dedented(text: str) -> str:
    return "\n".join(line[4:] for line in text.splitlines())


@pytest.mark.parametrize("imports_s", ["0", "0.5"])
def test_a_child_ends_with_its_parent_however_long_it_imports(imports_s: str) -> None:
    words = [sys.executable, "-c", dedented(PARENT), dedented(CHILD), imports_s]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if imports_s == "0":
            assert parent.stdout.readline() == "lives\n"
        parent.kill()
    deadline = time.monotonic() + PATIENCE_S
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_nobody_has_named_a_parent_lives() -> None:
    code = "from core.parent_death import die_with_parent; die_with_parent(); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "lives\n"
    environment = {**os.environ, "BATON_PARENT": "1"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 1
