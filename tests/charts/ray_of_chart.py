"""Run by test_on_ray.py: a Ray cluster with a node for each pod that the chart would make, each offering what its group offers.

`python -m tests.charts.ray_of_chart VALUES.json SEEN.json`: deploys the chart's Serve configuration there, asks each
model for a completion, and notes on which group's node each replica runs and how many processes say that they compute."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from cluster.deploy.kube.serving_mark import FOLDER
from cluster.deploy.kube.worker_groups import offered_resources
from cluster.deploy.serve_file import check_serve_file
from cluster.deploy.serve_rest import ServeRest
from core.config.residency_groups import colocations_of
from core.errors import ConfigError
from tests.charts.rendering import ROOT, cluster_spec, render, serve_config
from tests.deploy.ray_nodes import actors_here, last_words, ray_of_nodes
from tests.patience import PATIENCE_S

TIMEOUT_S = 400.0


def main() -> None:
    values, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    objects = render(values)
    cluster = ray_of_nodes(0)
    groups: dict[str, str] = {}
    for group in cluster_spec(objects)["workerGroupSpecs"]:
        for _ in range(group["replicas"]):
            node = cluster.add_node(num_cpus=2, resources=offered_resources(group))
            groups[node.node_id] = group["groupName"]
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    context = ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
    schema, configs = check_serve_file(serve_config(objects))
    rest = ServeRest(f"http://{context.dashboard_url}")
    rest.deploy(schema)
    try:
        rest.wait(list(configs), TIMEOUT_S, lambda _: None)
    except ConfigError:
        sys.stderr.write(last_words([Path(cluster.head_node.get_session_dir_path())]))
        raise
    config = configs["baton"]
    seen = {
        "placed": _placed(rest.applications(), groups),
        "ranks": _ranks(groups),
        "texts": {
            name: _complete(config.serve.port, name) for name in list(config.models) or ["baton-embedded"]
        },
        "marks": _marks(
            sum(
                (each.first.prefill_instances + each.first.decode_instances) * each.awake_models
                for each in colocations_of(config)
            )
        ),
    }
    target.write_text(json.dumps(seen))
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def _placed(applications: dict[str, Any], groups: dict[str, str]) -> dict[str, list[str]]:
    """The groups whose nodes have replicas, by deployment."""
    return {
        name: sorted(groups.get(replica["node_id"], "head") for replica in deployment["replicas"])
        for application in applications.values()
        for name, deployment in application["deployments"].items()
    }


def _ranks(groups: dict[str, str]) -> list[tuple[str, dict[str, float]]]:
    """The group on whose node each rank runs, and what it asks of Ray."""
    ranks = actors_here(class_name="BatonRank")
    return [(groups[rank.node_id], _asked(rank.required_resources)) for rank in ranks]


def _marks(wanted: int) -> int:
    """Wait for as many marks of processes that compute, and return how many there are."""
    deadline_at = time.monotonic() + PATIENCE_S
    while (
        found := len(list(Path(os.environ[FOLDER]).iterdir()))
    ) < wanted and time.monotonic() < deadline_at:
        time.sleep(0.2)
    return found


def _asked(resources: dict[str, float]) -> dict[str, float]:
    """Without what Ray adds to keep an actor in its bundle."""
    return {name.partition("_group_")[0]: n for name, n in resources.items() if "bundle" not in name}


def _complete(port: int, model: str) -> str:
    body = {"model": model, "prompt": "import os\n", "max_tokens": 8, "temperature": 0}
    deadline_at = time.monotonic() + TIMEOUT_S
    while httpx.get(f"http://127.0.0.1:{port}/ready", timeout=PATIENCE_S).status_code != 200:
        assert time.monotonic() < deadline_at
        time.sleep(0.2)
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    return answer.raise_for_status().json()["choices"][0]["text"]


if __name__ == "__main__":
    main()
