"""A Ray that does not come up in time is started again, and leaves no process behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster_process import ROOT

SCRIPT = """
import psutil, ray
from ray._private import services
from cluster.deploy.local_ray import LocalRay

asked, real, killed = [], services.get_node, []

def get_node(*arguments, **options):
    if not asked:
        asked.append(1)
        killed.extend(psutil.Process().children())
        raise Exception("The current node timed out during startup")
    return real(*arguments, **options)

services.get_node = get_node
local = LocalRay(2, 0, "test", {})
assert ray.is_initialized() and killed
gone, alive = psutil.wait_procs(killed, 60)
assert not alive, alive
local.stop()
print("started")
"""

NEVER = """
import ray
from cluster.deploy.local_ray import LocalRay
from core.errors import ConfigError

def init(**options):
    raise Exception("it timed out.")

ray.init = init
try:
    LocalRay(1, 0, "test", {})
except ConfigError as error:
    print(error)
"""

TASK = """
import psutil, ray
from cluster.deploy.local_ray import LocalRay
from tests.processes import command

local = LocalRay(2, 0, "test", {})
print(ray.get(ray.remote(lambda: "done").remote()))
started = psutil.Process().children(recursive=True)
commands = [" ".join(command(process)) for process in started]
assert any("runtime_env/agent" in command for command in commands), commands
assert not any("dashboard/agent" in command for command in commands), commands
local.stop()
_, left = psutil.wait_procs(started, 60)
print(left)
"""

OWN = """
import ray
from cluster.deploy.local_ray import LocalRay

local = LocalRay(2, 0, "test", {})
print(ray.get(ray.remote(lambda: __import__("net").__file__ + __import__("models").__file__).remote()))
local.stop()
"""


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_packages_are_batons_own_whatever_is_in_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("raise SystemError('not this one')")
    (tmp_path / "models").mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", OWN],
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    own = f"{ROOT}/net/__init__.py{ROOT}/models/__init__.py"
    assert done.stdout.splitlines()[-1:] == [own], done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_it_is_started_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=140, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["started"], done.stderr[-3000:]
    assert "Ray did not start, and is started again" in done.stderr


@pytest.mark.slow
def test_a_machine_on_which_it_never_starts_is_told_plainly() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEVER], capture_output=True, text=True, timeout=140, check=False
    )
    assert done.stdout.startswith("Ray did not start in 3 tries: it timed out. "), done.stderr[-3000:]
    assert "baton serve --local" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_it_has_no_agent_of_metrics_and_logs_and_leaves_no_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TASK], cwd=ROOT, capture_output=True, text=True, timeout=140, check=False
    )
    assert done.stdout.splitlines()[-2:] == ["done", "[]"], done.stderr[-3000:]
    assert "started again" not in done.stderr
