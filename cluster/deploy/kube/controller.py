"""`python -m cluster.deploy.kube.controller` does for a cluster that KubeRay runs what KubeRay does not do.

It writes events on the RayService (RayCluster, LeaderWorkerSet) when instances join, drain or are fenced. With `--scale`, where
Ray's own autoscaler is off, it keeps each worker group as large as what Serve wants to run there. It can learn all of its state
again, and the cluster serves without it."""

import argparse
import logging
import os
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from cluster.deploy.kube.instance_events import Instances, Notice
from cluster.deploy.kube.worker_groups import Change, changes, demand, patch
from cluster.deploy.serve_rest import ServeRest
from core.errors import ConfigError

log = logging.getLogger(__name__)

_KINDS = {
    "RayService": ("ray.io", "v1", "rayservices"),
    "RayCluster": ("ray.io", "v1", "rayclusters"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"),
}
"""By kind: its API's group, version and plural."""
_CONFLICT, _TEST_FAILED = 409, 422
_ATTEMPTS = 3
_TIMEOUT_S = 10.0


class Owner:
    """The RayService, RayCluster or head's LeaderWorkerSet `name`, through the Kubernetes API."""

    def __init__(self, api: Any, namespace: str, kind: str, name: str) -> None:
        self._core, self._objects = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self._namespace, self._kind, self._name = namespace, kind, name

    def cluster(self) -> dict[str, Any] | None:
        """Return the RayCluster that serves now, or None where there is none yet."""
        found = self._get(self._kind, self._name)
        if self._kind == "RayCluster":
            return found
        active = found.get("status", {}).get("activeServiceStatus", {}).get("rayClusterName", "")
        return self._get("RayCluster", active) if active else None

    def pods(self, cluster: str) -> list[Any]:
        selector = f"ray.io/cluster={cluster}"
        found = self._core.list_namespaced_pod(
            self._namespace, label_selector=selector, _request_timeout=_TIMEOUT_S
        )
        pods: list[Any] = found.items
        return [pod for pod in pods if pod.metadata.deletion_timestamp is None]

    def apply(self, cluster: str, change: Change, resource_version: str) -> bool:
        """Patch the cluster. Returns False where somebody else was faster, and nothing was changed."""
        body = patch(change, resource_version)
        group, version, plural = _KINDS["RayCluster"]
        try:
            self._objects.patch_namespaced_custom_object(
                group,
                version,
                self._namespace,
                plural,
                cluster,
                body,
                _content_type="application/json-patch+json",
                _request_timeout=_TIMEOUT_S,
            )
        except ApiException as error:
            if error.status in (_CONFLICT, _TEST_FAILED):
                return False
            raise
        return True

    def tell(self, notice: Notice, now: datetime) -> None:
        """Write an event on the object."""
        event = client.CoreV1Event(
            metadata=client.V1ObjectMeta(generate_name=f"{self._name}-", namespace=self._namespace),
            involved_object=client.V1ObjectReference(
                api_version="/".join(_KINDS[self._kind][:2]),
                kind=self._kind,
                name=self._name,
                namespace=self._namespace,
                uid=self._get(self._kind, self._name)["metadata"]["uid"],
            ),
            type=notice.kind,
            reason=notice.reason,
            message=notice.message,
            first_timestamp=now,
            last_timestamp=now,
            count=1,
            source=client.V1EventSource(component="baton"),
        )
        self._core.create_namespaced_event(self._namespace, event, _request_timeout=_TIMEOUT_S)

    def _get(self, kind: str, name: str) -> dict[str, Any]:
        group, version, plural = _KINDS[kind]
        found: Any = self._objects.get_namespaced_custom_object(
            group, version, self._namespace, plural, name, _request_timeout=_TIMEOUT_S
        )
        return found


def http_client(api_key: str, ca: str) -> httpx.Client:
    """Return a client. `ca` is a PEM file of the authority that has signed the ingresses' certificates; empty means those that
    the system trusts."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(
        headers=headers, verify=ssl.create_default_context(cafile=ca or None), timeout=_TIMEOUT_S
    )


def fit(owner: Owner, applications: Callable[[], Mapping[str, Any]]) -> int:
    """Bring every worker group to its size, and return how many were changed. A lost race is read and tried again."""
    done = 0
    for _ in range(_ATTEMPTS):
        cluster = owner.cluster()
        if cluster is None:
            return done
        name, running = cluster["metadata"]["name"], applications()
        pods = owner.pods(name)
        groups: dict[str, list[str]] = {}
        for pod in pods:
            groups.setdefault(pod.metadata.labels.get("ray.io/group", ""), []).append(pod.metadata.name)
        addresses = _addresses(running)
        busy = {pod.metadata.name for pod in pods if pod.status.pod_ip in addresses}
        wanted = changes(cluster["spec"], demand(running), groups, busy)
        if not wanted:
            return done
        if owner.apply(name, wanted[0], cluster["metadata"]["resourceVersion"]):
            log.info("group %s: %d pods", wanted[0].group, wanted[0].replicas)
            done += 1
    return done


def _addresses(applications: Mapping[str, Any]) -> set[str]:
    return {
        replica["node_ip"]
        for application in applications.values()
        for deployment in application["deployments"].values()
        for replica in deployment["replicas"]
        if replica.get("node_ip")
    }


def watch(owner: Owner, http: httpx.Client, endpoint: str, seen: dict[str, Instances]) -> None:
    """Look once at the instances of each model behind `endpoint`. `seen`: by model; it is added to. A model whose scheduler does
    not answer keeps nobody from looking at the next. Raises httpx.HTTPError where the endpoint does not answer."""
    answer = http.get(f"{endpoint}/cluster").raise_for_status().json()
    names = [one["model"] for one in answer.get("models", ())]
    _tell(owner, seen, answer, of_many=bool(names))
    for name in names:
        if name != answer["model"]:
            _try(lambda: _tell(owner, seen, _cluster_of(http, endpoint, name), of_many=True))  # noqa: B023


def _cluster_of(http: httpx.Client, endpoint: str, model: str) -> dict[str, Any]:
    found: dict[str, Any] = http.get(f"{endpoint}/cluster", params={"model": model}).raise_for_status().json()
    return found


def _tell(owner: Owner, seen: dict[str, Instances], answer: Mapping[str, Any], *, of_many: bool) -> None:
    """Write what has happened to the instances of one model since the last look."""
    name = answer["model"]
    of_model = seen.setdefault(name, Instances(name if of_many else ""))
    for notice in of_model.look(answer["instances"], answer["sleepers"]):
        owner.tell(notice, datetime.now(UTC))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--namespace", required=True)
    made.add_argument("--kind", choices=_KINDS, required=True)
    made.add_argument("--name", required=True)
    made.add_argument("--endpoint", action="append", default=[], help="an API; may be repeated")
    made.add_argument("--ca", default="", help="PEM file of the authority of the endpoints' certificates")
    made.add_argument("--scale", action="store_true", help="size the worker groups by what Serve wants")
    made.add_argument("--dashboard", required=True, help="of the Ray cluster")
    made.add_argument("--period-s", type=float, default=5.0)
    made.add_argument("--looked", type=Path, help="a file that is renewed after each look, for the kubelet")
    return made


def main() -> None:
    given = parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config.load_incluster_config()
    owner = Owner(client.ApiClient(), given.namespace, given.kind, given.name)
    http = http_client(os.environ.get("BATON_METRICS_KEY", ""), given.ca)
    seen: dict[str, dict[str, Instances]] = {endpoint: {} for endpoint in given.endpoint}
    while True:
        for endpoint, instances in seen.items():
            _try(lambda: watch(owner, http, endpoint, instances))  # noqa: B023
        if given.scale:
            _try(lambda: fit(owner, lambda: ServeRest(given.dashboard).applications()))
        if given.looked is not None:
            given.looked.touch()
        time.sleep(given.period_s)


def _try(work: Callable[[], object]) -> None:
    """Run one look, and log what cannot be reached, until the next look."""
    try:
        work()
    except (ApiException, httpx.HTTPError, ConfigError, OSError) as error:
        log.warning("%s: %s", type(error).__name__, error)


if __name__ == "__main__":
    main()
