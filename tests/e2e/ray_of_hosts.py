"""Run by test_hosts.py: a Ray cluster of three nodes, of which two have room for one stage of a prefill instance each.

`python -m tests.e2e.ray_of_hosts MODEL PROMPTS.json SEEN.json`: asks for completions, kills the instance's memory server, asks again."""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve

from cluster.deploy.serve_file import check_serve_file
from cluster.deploy.serve_rest import ServeRest
from tests.deploy.ray_nodes import actors_here, ray_of_nodes
from tests.e2e.cluster_process import ROOT
from tests.patience import PATIENCE_S
from tests.ports import free_port

TIMEOUT_S = 120.0


def serve_content(model: str, port: int) -> dict[str, Any]:
    args = {
        "model": {"path": model},
        "engine": {"block_size": 4, "num_blocks": 256},
        "schedule": {"local_threshold_tokens": 4},
        "serve": {"port": port, "drain_notice_s": 0},
        "prefill": {"pp": 2, "hosts": 2},
    }
    prefill = {
        "name": "PrefillPool",
        "ray_actor_options": {"num_cpus": 0},
        "placement_group_bundles": [{"CPU": 0.25, "prefill": 1}] * 2,
        "placement_group_strategy": "PACK",
    }
    application = {"name": "baton", "import_path": "cluster.deploy.serve_app:build", "route_prefix": None}
    return {
        "proxy_location": "Disabled",
        "applications": [application | {"args": args, "deployments": [prefill]}],
    }


def main() -> None:
    model, prompts, target = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    cluster = ray_of_nodes(2)
    for _ in range(2):
        cluster.add_node(num_cpus=1, resources={"prefill": 1})
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    context = ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
    port = free_port()
    schema, configs = check_serve_file(serve_content(model, port))
    rest = ServeRest(f"http://{context.dashboard_url}")
    rest.deploy(schema)
    rest.wait(list(configs), TIMEOUT_S, lambda _: None)
    url = f"http://127.0.0.1:{port}"
    wait(url, 2)
    seen = {"first": complete(url, prompts), "handed_over": grants(url)}
    ranks, memory_servers = actors("BatonRank"), actors("BatonMemoryServer")
    seen |= {"nodes": len({actor.node_id for actor in ranks}), "memory servers": len(memory_servers)}
    started = time.monotonic()
    os.kill(memory_servers[0].pid, signal.SIGKILL)
    while len(instances(url)) > 1:
        time.sleep(0.02)
    seen |= {"lost_after_s": time.monotonic() - started, "meanwhile": complete(url, prompts)}
    pids = [actor.pid for actor in (*ranks, *memory_servers)]
    wait(url, 2)
    seen |= {"left": [pid for pid in pids if psutil.pid_exists(pid)], "after": complete(url, prompts)}
    target.write_text(json.dumps(seen))
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def actors(kind: str) -> list[Any]:
    return actors_here(class_name=kind, state="ALIVE")


def instances(url: str) -> list[dict[str, Any]]:
    return httpx.get(f"{url}/cluster", timeout=PATIENCE_S).json()["instances"]


def grants(url: str) -> int:
    return sum(instance["work"]["grants"] for instance in instances(url))


def wait(url: str, count: int) -> None:
    deadline_at = time.monotonic() + TIMEOUT_S
    while True:
        assert time.monotonic() < deadline_at
        try:
            if httpx.get(f"{url}/ready").status_code == 200 and len(instances(url)) == count:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)


def complete(url: str, prompts: list[list[int]]) -> list[str]:
    """All at once, so that they queue: an idle decode instance computes prompts as short as these itself, which costs less."""
    model = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"][0]["id"]

    def answer(prompt: list[int]) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        answered = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        return answered.raise_for_status().json()["choices"][0]["text"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(answer, prompts))


if __name__ == "__main__":
    main()
