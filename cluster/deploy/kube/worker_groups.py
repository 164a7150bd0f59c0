"""How many pods each worker group needs for what Serve wants to run, and the patch that says so.

Serve places replicas by Ray resources, and a group's pods offer them, so these two are all that is needed. It follows KubeRay's
RayCluster v1 and the way Ray's own autoscaler changes it: only `replicas` and `scaleStrategy.workersToDelete`."""

import json
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Change:
    """A worker group's new size. `idle`: the pods to take away, none of which runs a replica."""

    group: str
    index: int
    replicas: int
    idle: tuple[str, ...] = ()


def demand(applications: Mapping[str, Any]) -> dict[str, float]:
    """Return, by Ray resource, what all replicas that Serve wants will ask for. `applications` are as in Serve's
    ApplicationDetails."""
    total: dict[str, float] = {}
    for application in applications.values():
        for deployment in application["deployments"].values():
            config = deployment["deployment_config"]
            bundles = config.get("placement_group_bundles") or [_resources(config)]
            for bundle in bundles:
                for name, amount in bundle.items():
                    total[name] = total.get(name, 0.0) + amount * deployment["target_num_replicas"]
    return total


def changes(
    spec: Mapping[str, Any],
    wanted: Mapping[str, float],
    pods: Mapping[str, Sequence[str]],
    busy: Collection[str],
) -> list[Change]:
    """Return the groups whose size is not what `wanted` needs, within their bounds.

    `spec` is a RayCluster's, `pods` are by group, and `busy` are pods with a replica. A group shrinks by idle pods only."""
    made: list[Change] = []
    for index, group in enumerate(spec["workerGroupSpecs"]):
        offered = offered_resources(group)
        needs = [math.ceil(wanted.get(name, 0.0) / amount) for name, amount in offered.items() if amount]
        if not needs:
            continue
        size, now = _bounded(max(needs), group), int(group.get("replicas", 0))
        idle = tuple(pod for pod in pods.get(group["groupName"], ()) if pod not in busy)[: max(0, now - size)]
        if size > now or idle:
            made.append(Change(group["groupName"], index, max(size, now - len(idle)), idle))
    return made


def patch(change: Change, resource_version: str) -> list[dict[str, Any]]:
    """Return a JSON patch (RFC 6902). It fails, and changes nothing, where the cluster has been changed since it was read."""
    group = f"/spec/workerGroupSpecs/{change.index}"
    operations: list[dict[str, Any]] = [
        {"op": "test", "path": "/metadata/resourceVersion", "value": resource_version},
        {"op": "test", "path": f"{group}/groupName", "value": change.group},
        {"op": "replace", "path": f"{group}/replicas", "value": change.replicas},
    ]
    if change.idle:
        strategy = {"workersToDelete": list(change.idle)}
        operations.append({"op": "add", "path": f"{group}/scaleStrategy", "value": strategy})
    return operations


def offered_resources(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the custom Ray resources of one of the group's pods. `rayStartParams.resources` is quoted for a shell and for
    JSON."""
    text = group.get("rayStartParams", {}).get("resources", "")
    return json.loads(shlex.split(text)[0]) if text else {}


def _resources(config: Mapping[str, Any]) -> dict[str, float]:
    return dict((config.get("ray_actor_options") or {}).get("resources") or {})


def _bounded(size: int, group: Mapping[str, Any]) -> int:
    return max(int(group.get("minReplicas", 0)), min(size, int(group.get("maxReplicas", size))))
