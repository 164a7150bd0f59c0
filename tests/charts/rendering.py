"""The chart as Helm's own engine renders it, and the examples that are rendered."""

import json
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from cluster.deploy.deployment_names import deployment_suffix
from core.config.cluster_config import ClusterConfig
from core.config.pools import PoolName, pools_of
from core.config.residency_groups import Colocation, colocations_of

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "baton"
EXAMPLES = {path.stem: path for path in sorted((ROOT / "charts" / "examples").glob("*.yaml"))}

Object = dict[str, Any]


def render(values: Object | None = None, name: str = "demo", namespace: str = "llm") -> list[Object]:
    """Every object. Raises helm_python.HelmError for values that the chart refuses."""
    with Chart.load(str(CHART)) as chart:
        files = chart.render(values or {}, name=name, namespace=namespace)
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    # libyaml reads as SafeLoader does, and many times as fast.
    return [made for text in texts for made in yaml.load_all(text, yaml.CSafeLoader) if made]


@cache
def example(name: str) -> list[Object]:
    """Rendered once: not to be changed."""
    return render(yaml.safe_load(EXAMPLES[name].read_text()))


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    """By name."""
    return {made["metadata"]["name"]: made for made in objects if made["kind"] == kind}


def cluster_spec(objects: list[Object]) -> Object:
    """The one Ray cluster's; of LeaderWorkerSets as KubeRay would be told."""
    for made in objects:
        if made["kind"] == "RayService":
            return made["spec"]["rayClusterConfig"]
        if made["kind"] == "RayCluster":
            return made["spec"]
    sets = of_kind(objects, "LeaderWorkerSet")
    head = sets.pop("demo-baton-head")["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    env = {one["name"]: one for one in container(head)["env"]}
    token = env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"]
    return {
        "authOptions": {"mode": env["RAY_AUTH_MODE"]["value"], "secretName": token},
        "headGroupSpec": {"template": head},
        "workerGroupSpecs": [_worker_group(name, made["spec"]) for name, made in sets.items()],
    }


def _worker_group(name: str, spec: Object) -> Object:
    groups, template = spec["leaderWorkerTemplate"], spec["leaderWorkerTemplate"]["workerTemplate"]
    parts = shlex.split(container(template)["command"][-1])
    params = dict(
        part.removeprefix("--").split("=", 1) for part in parts if part.startswith("--") and "=" in part
    )
    params["resources"] = json.dumps(params["resources"])
    num_groups = spec.get("replicas")
    if num_groups is None:  # KEDA's; as many as the chart would begin with
        num_groups = 2
    return {
        "groupName": name.removeprefix("demo-baton-"),
        "replicas": num_groups * groups["size"],
        "rayStartParams": params,
        "template": template,
    }


def serve_config(objects: list[Object]) -> Object:
    for made in objects:
        if made["kind"] == "RayService":
            return yaml.safe_load(made["spec"]["serveConfigV2"])
        if made["kind"] == "ConfigMap" and "serve.yaml" in made["data"]:
            return yaml.safe_load(made["data"]["serve.yaml"])
    raise AssertionError("no Serve configuration")


def deployed_pools(application: Object) -> Iterator[tuple[Colocation, PoolName, Object]]:
    """Yield whose pool each is, its role, and its deployment."""
    config = ClusterConfig.model_validate(application["args"])
    deployments = {one["name"]: one for one in application["deployments"]}
    for models in colocations_of(config):
        for pool in pools_of(models.first):
            name = f"{pool.name.title()}Pool{deployment_suffix(config, models.name)}"
            if pool.num_instances:
                yield models, pool.name, deployments[name]


def num_replicas(application: Object) -> dict[str, int]:
    """How many replicas each deployment begins with."""
    config = ClusterConfig.model_validate(application["args"])
    found = {"Ingress": config.ingress_instances}
    found |= {f"Group{deployment_suffix(config, name)}": 1 for name in config.residency_groups}
    for row in config.rows:
        found[f"Scheduler{deployment_suffix(config, row.model.name)}"] = row.num_scheduler_processes
    for models, role, deployment in deployed_pools(application):
        found[deployment["name"]] = getattr(models.first, f"{role}_instances")
    return found


def asked_of(deployment: Object) -> dict[str, float]:
    """What one instance asks of Ray beside CPUs and GPUs, and `GPU`."""
    bundles, options = deployment.get("placement_group_bundles"), deployment["ray_actor_options"]
    if bundles:
        return {name: sum(bundle.get(name, 0) for bundle in bundles) for name in bundles[0] if name != "CPU"}
    gpus = {"GPU": options["num_gpus"]} if options.get("num_gpus") else {}
    return {**options.get("resources", {}), **gpus}


def pods(objects: list[Object]) -> dict[str, Object]:
    """Pod templates, by group."""
    spec = cluster_spec(objects)
    return {
        "head": spec["headGroupSpec"]["template"],
        **{group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]},
    }


def container(template: Object) -> Object:
    [ray] = [one for one in template["spec"]["containers"] if one["name"] == "ray"]
    return ray


def all_pods(objects: list[Object]) -> list[Object]:
    """Every pod template, those outside of the Ray cluster too."""
    others = [made for made in objects if made["kind"] in ("Job", "Deployment", "StatefulSet")]
    return [*pods(objects).values(), *(made["spec"]["template"] for made in others)]


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector chooses a pod with these labels."""
    rules = selector.get("matchExpressions", [])
    assert all(rule["operator"] == "In" for rule in rules)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(rule["key"]) in rule["values"] for rule in rules
    )
