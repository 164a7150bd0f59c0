"""Run by test_doctor.py: `python -m tests.e2e.doctor_on_nodes CONFIG`: `baton doctor` on a Ray cluster of three nodes with a CPU each."""

import subprocess
import sys

from tests.deploy.ray_nodes import ray_of_nodes
from tests.e2e.cluster_process import ROOT

if __name__ == "__main__":
    cluster = ray_of_nodes(1)
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    command = [sys.executable, "-m", "baton.cli", "doctor", "--ray-address", cluster.address]
    command += ["--config", sys.argv[1], "--mib", "4", "--backend", "gloo", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    cluster.shutdown()
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    sys.exit(done.returncode)
