"""What must start fast, or in many processes, does without torch and transformers."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "baton.cli.serve",
        "cluster.deploy.launch",
        "cluster.deploy.serve_app",
        "cluster.deploy.ingress_deployment",
        "cluster.deploy.scheduler_deployment",
        "cluster.deploy.pool_deployments",
    ],
)
def test_imported_without_torch(module: str) -> None:
    assert imported(module, ("torch", "transformers")) == "[]"


def test_the_command_line_is_imported_without_numpy() -> None:
    assert imported("baton.cli.serve", ("numpy",)) == "[]"


def imported(module: str, names: tuple[str, ...]) -> str:
    """Return those of `names` that an interpreter has imported after `module`."""
    program = f"import sys, {module}; print([name for name in {names} if name in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()
