"""`python -m cluster.deploy.kube.prestop`: before a pod's container gets SIGTERM, the processes on its Ray node leave in good
order.

A worker's node is drained: Serve starts its replicas elsewhere where there is room and stops them here, which drains ingresses
and instances. The head stays until nothing serves any more, for Serve's controller runs there. Nothing is raised, since a pod
that cannot be drained must end all the same."""

import argparse
import logging
import time
from typing import Any

import ray
from ray import _raylet
from ray.core.generated import autoscaler_pb2
from ray.util.state import list_actors

log = logging.getLogger(__name__)

_ray: Any = _raylet
_messages: Any = autoscaler_pb2
_POLL_S = 1.0
_HEAD = "node:__internal_head__"
_REPLICA = "ServeReplica:"


def leave(timeout_s: float) -> bool:
    """Leave. Returns whether everything has left within `timeout_s`. Needs a connection to the node's Ray cluster."""
    deadline_at = time.monotonic() + timeout_s
    node_id = ray.get_runtime_context().get_node_id()
    on_head = any(node["NodeID"] == node_id and _HEAD in node["Resources"] for node in ray.nodes())
    if not on_head:
        _drain(node_id)
    while _num_replicas(None if on_head else node_id):
        if time.monotonic() > deadline_at:
            return False
        time.sleep(_POLL_S)
    return True


def _drain(node_id: str) -> None:
    """Drain the node. Its deadline is past at once, so that Serve does not wait for replacements first, which may have no room
    until this pod is gone. Serve gives each replica its own graceful_shutdown_timeout_s. `ray drain-node` asks the same, after
    it has started a Python with all of Ray: a minute on a busy machine, out of the pod's grace period."""
    gcs = _ray.GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = _messages.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = time.time_ns() // 1_000_000 + 1000
    accepted, why = gcs.drain_node(node_id, reason, "its pod is being stopped", deadline_ms)
    if not accepted:
        raise RuntimeError(f"Ray does not drain node {node_id}: {why}")


def _num_replicas(node_id: str | None) -> int:
    """Count Serve's replicas on the node; None means on all."""
    # Without an address, whichever Ray began last on this machine would be asked.
    address = ray.get_runtime_context().gcs_address
    actors: list[Any] = list_actors(address, filters=[("state", "=", "ALIVE")], limit=10_000)
    return sum(actor.class_name.startswith(_REPLICA) and node_id in (None, actor.node_id) for actor in actors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout-s", type=float, required=True)
    timeout_s = parser.parse_args().timeout_s
    logging.basicConfig(level=logging.INFO)
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        if not leave(timeout_s):
            log.warning("not everything had left after %g s", timeout_s)
    except Exception:
        log.exception("the node could not be drained")


if __name__ == "__main__":
    main()
