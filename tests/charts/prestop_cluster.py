"""Run by test_prestop.py: a head and two workers, one replica with a request in flight, and the hook on the replica's node."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.deploy.kube.prestop import leave
from tests.deploy.ray_nodes import last_words, ray_of_nodes

ROOT = Path(__file__).parents[2]


@serve.deployment(
    ray_actor_options={"num_cpus": 0.1, "resources": {"ingress": 1}}, graceful_shutdown_timeout_s=20
)
class Slow:
    async def __call__(self, seconds: float, begun: str = "") -> tuple[str, str]:
        if begun:
            await asyncio.to_thread(Path(begun).touch)
        await asyncio.sleep(seconds)
        return "whole", ray.get_runtime_context().get_node_id()


@ray.remote(num_cpus=0)
def hook(timeout_s: float) -> bool:
    """As in a pod of this node."""
    return leave(timeout_s)


def on(node_id: str) -> Any:
    return hook.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))


def main() -> None:
    cluster: Any = ray_of_nodes(1)
    for _ in range(2):
        cluster.add_node(num_cpus=1, resources={"ingress": 1})
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    serve.start(proxy_location="Disabled")
    try:
        seen = Path(sys.argv[1])
        seen.write_text(json.dumps(leaves_in_order(seen.with_suffix(".begun"))))
    except BaseException:
        sys.stderr.write(last_words([Path(cluster.head_node.get_session_dir_path())]))
        raise
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def leaves_in_order(begun: Path) -> dict[str, Any]:
    """Drain the node of the replica while it answers, and then the head."""
    handle = serve.run(Slow.bind(), name="baton", route_prefix=None)
    _, before = handle.remote(0).result(timeout_s=150)
    running = handle.remote(5, str(begun))
    while not begun.exists():
        time.sleep(0.05)
    started = time.monotonic()
    left = ray.get(on(before).remote(150), timeout=170)
    took_s = time.monotonic() - started
    sys.stderr.write(f"the node has left after {took_s:.0f} s\n")
    answered, where = running.result(timeout_s=1)
    _, after = handle.remote(0).result(timeout_s=150)
    head = ray.get_runtime_context().get_node_id()
    head_waits = ray.get(on(head).remote(1), timeout=120)
    serve.delete("baton")
    head_leaves = ray.get(on(head).remote(100), timeout=120)
    return {
        "left": left,
        "took_s": took_s,
        "answered": answered,
        "answered_where_it_ran": where == before,
        "moved": after != before,
        "head_waits_for_others": not head_waits,
        "head_leaves_when_all_have": head_leaves,
    }


if __name__ == "__main__":
    main()
