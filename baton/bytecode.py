"""Keep the bytecode of what the processes of a cluster import: python -m baton.bytecode.

uv installs sources alone. The first processes of a cluster would compile them next to each other. Where PYTHONDONTWRITEBYTECODE
is set, as it is in many images, every process would compile two thousand modules at every start."""

import os
import subprocess
import sys

from core.errors import ConfigError

PROCESSES = {
    "Ray's own": "import optparse, psutil, ray._private.runtime_env.agent.main",
    "an instance": "import ray._private.workers.default_worker, cluster.deploy.pool_instance",
    "an ingress": (
        "from cluster.deploy.ingress_deployment import leave_out_torch; leave_out_torch(); "
        "import baton.cli.main, baton.cli.serve, cluster.deploy.launch, cluster.deploy.ingress_process, "
        "pydantic.v1, ray.dashboard.optional_deps, ray.serve._private.controller, rich.console, rich.table; "
        "from models.files.hub import resolve; from models.text.tokenizer import load_tokenizer; "
        "load_tokenizer(resolve('embedded'))"
    ),
}
"""Programs that import what a process does, its own lazy imports included. An ingress stands for whoever deploys, too."""


def keep_bytecode() -> None:
    """Import all of it once, each process's part in a process of its own. Raises ConfigError where an import fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    running = {
        process: subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True
        )
        for process, program in PROCESSES.items()
    }
    for process, each in running.items():
        _, said = each.communicate()
        if each.returncode:
            raise ConfigError(f"{process} process cannot import its code: {said.strip().splitlines()[-1]}")


if __name__ == "__main__":
    keep_bytecode()
