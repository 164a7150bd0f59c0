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
    heavy = "[name for name in ('torch', 'transformers') if name in sys.modules]"
    command = [sys.executable, "-c", f"import sys, {module}; print({heavy})"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
