"""A Ray of several nodes on this machine."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from ray._private import node
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

from cluster.deploy.ray_node import PatientNode


def ray_of_nodes(num_cpus: int) -> Cluster:
    """Return a Ray's head, with a dashboard at a port that the kernel chooses: there may be other Rays here, and tests may run
    beside each other. A node that this process starts later comes up on a busy machine, too."""
    node.Node = PatientNode
    head = {"num_cpus": num_cpus, "include_dashboard": True, "dashboard_port": 0}
    return Cluster(initialize_head=True, head_node_args=head)


def actors_here(**wanted: str) -> list[Any]:
    """Actors of the Ray that this process has joined; without an address, whichever began last on this machine would be asked."""
    address = ray.get_runtime_context().gcs_address
    return list_actors(address, filters=[(key, "=", value) for key, value in wanted.items()], detail=True)


def last_words(sessions: Iterable[Path]) -> str:
    """How the logs of Ray and of Serve's replicas end, for a test that has failed."""
    patterns = ("monitor.log", "raylet*.out", "serve/*.log", "worker-*.err")
    logs = [log for session in sessions for pattern in patterns for log in (session / "logs").glob(pattern)]
    ends = {log: log.read_text(errors="replace").splitlines()[-8:] for log in logs}
    return "\n".join(f"{log}:\n  " + "\n  ".join(lines) for log, lines in ends.items() if lines)
