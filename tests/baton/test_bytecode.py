"""Bytecode that is kept once, for processes that may not write any."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_MODULES = (
    "baton.cli.serve",
    "cluster.deploy.launch",
    "cluster.deploy.scheduler_deployment",
    "cluster.deploy.ingress_process",
    "cluster.deploy.pool_instance",
    "ray._private.workers.default_worker",
    "ray._private.runtime_env.agent.main",
)
_LEFT = """
import importlib, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
files = [vars(module).get("__cached__") for module in list(sys.modules.values()) if module]
print(*[file for file in files if file and not os.path.exists(file)])
"""


@pytest.mark.slow
@pytest.mark.turns(6, number=0)
def test_no_process_of_a_cluster_compiles_what_it_imports(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert _left_to_compile(environment, "core.types"), "a new checkout has no bytecode"
    subprocess.run([sys.executable, "-m", "baton.bytecode"], env=environment, check=True)
    assert _left_to_compile(environment, *_MODULES) == ""


def _left_to_compile(environment: dict[str, str], *modules: str) -> str:
    """Return the bytecode files that an interpreter which imports `modules` looks for, and that are not there."""
    done = subprocess.run(
        [sys.executable, "-c", _LEFT, *modules], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()
