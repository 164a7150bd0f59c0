"""The controller against an API server: worker groups follow Serve, races are lost without harm, events say what happened."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from kubernetes import client

from cluster.deploy.kube.controller import Owner, fit, watch
from cluster.deploy.kube.instance_events import Instances, Notice
from core.reports import InstanceStatus
from tests.charts.rendering import cluster_spec, render
from tests.deploy.kube.fake_api import FakeApi

CLUSTER = "demo-baton-raycluster-x"
SIZES = {"ingress_instances": 1, "prefill_instances": 1, "decode_instances": 2}


@pytest.fixture
def api() -> FakeApi:
    """What the chart makes, with the pods that KubeRay would have made of it."""
    fake = FakeApi()
    spec = cluster_spec(render({"config": SIZES, "decode": {"maxReplicas": 4}}))
    for group in spec["workerGroupSpecs"]:
        group["minReplicas"] = 0
        group["maxReplicas"] = 4
        for number in range(group["replicas"]):
            add_pod(fake, group["groupName"], number)
    fake.put("rayclusters", {"metadata": {"name": CLUSTER, "uid": "c"}, "spec": spec})
    status = {"activeServiceStatus": {"rayClusterName": CLUSTER}}
    fake.put("rayservices", {"metadata": {"name": "demo-baton", "uid": "s"}, "spec": {}, "status": status})
    return fake


def add_pod(fake: FakeApi, group: str, number: int) -> None:
    labels = {"ray.io/cluster": CLUSTER, "ray.io/group": group}
    status = {"podIP": f"10.0.{len(group)}.{number}"}
    fake.pods.append({"metadata": {"name": f"{group}-{number}", "labels": labels}, "status": status})


@pytest.fixture
def owner(api: FakeApi) -> Iterator[Owner]:
    with api.serving() as url:
        yield Owner(client.ApiClient(client.Configuration(host=url)), "llm", "RayService", "demo-baton")


def serve(**wanted: int) -> dict[str, Any]:
    """As Serve describes what it runs: `decode=3` replicas, on the first pods of their group."""
    deployments = {
        role: {
            "target_num_replicas": number,
            "deployment_config": {"ray_actor_options": {"num_cpus": 0.25, "resources": {role: 1}}},
            "replicas": [{"node_ip": f"10.0.{len(role)}.{i}"} for i in range(number)],
        }
        for role, number in wanted.items()
    }
    return {"baton": {"deployments": deployments}}


def sizes(api: FakeApi) -> dict[str, int]:
    groups = api.objects["rayclusters", CLUSTER]["spec"]["workerGroupSpecs"]
    return {group["groupName"]: group["replicas"] for group in groups}


def deleted(api: FakeApi, group: str) -> list[str]:
    groups = api.objects["rayclusters", CLUSTER]["spec"]["workerGroupSpecs"]
    [found] = [one for one in groups if one["groupName"] == group]
    return found.get("scaleStrategy", {}).get("workersToDelete", [])


def test_groups_grow_with_what_serve_wants(api: FakeApi, owner: Owner) -> None:
    assert sizes(api) == {"ingress": 1, "prefill": 1, "decode": 2}
    assert fit(owner, lambda: serve(ingress=2, prefill=2, decode=3)) == 2
    assert sizes(api) == {"ingress": 1, "prefill": 2, "decode": 3}, "an ingress pod has room for four"
    assert fit(owner, lambda: serve(ingress=2, prefill=2, decode=3)) == 0
    assert fit(owner, lambda: serve(ingress=2, prefill=2, decode=9)) == 1
    assert sizes(api)["decode"] == 4, "its maximum"


def test_a_group_shrinks_by_the_pods_that_run_nothing(api: FakeApi, owner: Owner) -> None:
    running = serve(ingress=1, prefill=1, decode=2)
    running["baton"]["deployments"]["decode"]["target_num_replicas"] = 1
    assert fit(owner, lambda: running) == 0, "both pods are busy: Serve drains one of them first"
    running["baton"]["deployments"]["decode"]["replicas"].pop(0)
    assert fit(owner, lambda: running) == 1
    assert (sizes(api)["decode"], deleted(api, "decode")) == (1, ["decode-0"])


def test_a_lost_race_is_read_again(api: FakeApi, owner: Owner) -> None:
    def meddle() -> None:
        """Somebody puts a group in front of ours and changes its size: every index means another group now."""
        cluster = api.objects["rayclusters", CLUSTER]
        cluster["spec"]["workerGroupSpecs"].insert(0, {"groupName": "other", "replicas": 7})
        api.put("rayclusters", cluster)

    api.before_patch = [meddle]
    assert fit(owner, lambda: serve(ingress=1, prefill=2, decode=2)) == 1
    assert api.num_refused == 1
    assert sizes(api) == {"other": 7, "ingress": 1, "prefill": 2, "decode": 2}


def test_a_size_that_somebody_else_has_set_meanwhile_stays(api: FakeApi, owner: Owner) -> None:
    def meddle() -> None:
        cluster = api.objects["rayclusters", CLUSTER]
        cluster["spec"]["workerGroupSpecs"][1]["replicas"] = 4
        api.put("rayclusters", cluster)

    assert list(sizes(api))[1] == "decode"
    api.before_patch = [meddle]
    assert fit(owner, lambda: serve(ingress=1, prefill=1, decode=3)) == 0
    assert (api.num_refused, sizes(api)["decode"]) == (1, 4)


def test_a_service_without_a_cluster_is_left_alone(api: FakeApi, owner: Owner) -> None:
    api.objects["rayservices", "demo-baton"]["status"] = {}
    assert fit(owner, lambda: serve(decode=3)) == 0


def instance(address: str, leaving: bool = False, defect: str = "") -> dict[str, Any]:
    """As /cluster describes it."""
    return asdict(
        InstanceStatus(
            address=address,
            prefills=False,
            decodes=True,
            num_blocks=64,
            free_blocks=64,
            num_waiting=0,
            num_running=0,
            defect=defect,
            leaving=leaving,
        )
    )


def test_what_the_endpoint_says_becomes_events(api: FakeApi, owner: Owner) -> None:
    answers = [[instance("a:1")], [instance("a:1", leaving=True)], [], []]

    def cluster(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/cluster"
        return httpx.Response(200, json={"model": "a", "instances": answers.pop(0), "sleepers": []})

    seen: dict[str, Instances] = {}
    with httpx.Client(transport=httpx.MockTransport(cluster)) as http:
        for _ in range(4):
            watch(owner, http, "http://demo-baton", seen)
    assert [event["reason"] for event in api.events] == [
        "InstanceJoined",
        "InstanceDraining",
        "InstanceDrained",
    ]
    assert "decode instance a:1" in api.events[0]["message"]


def test_each_model_behind_an_endpoint_is_looked_at_and_one_that_sleeps_is_not_lost(
    api: FakeApi, owner: Owner
) -> None:
    awake = {"code": [[instance("a:1")], [], []], "chat": [[instance("b:1")], [], []]}

    def cluster(request: httpx.Request) -> httpx.Response:
        name = request.url.params.get("model", "code")
        if name == "lost":
            return httpx.Response(503)
        asleep = [{"address": "a:1"}] if name == "code" else []
        summaries = [{"model": one} for one in ("code", "lost", "chat")]
        answer = {"model": name, "instances": awake[name].pop(0), "sleepers": asleep, "models": summaries}
        return httpx.Response(200, json=answer)

    seen: dict[str, Instances] = {}
    with httpx.Client(transport=httpx.MockTransport(cluster)) as http:
        for _ in range(3):
            watch(owner, http, "http://demo-baton", seen)
    assert [(event["reason"], event["message"].partition(" t")[0]) for event in api.events[:2]] == [
        ("InstanceJoined", "decode instance a:1 of code"),
        ("InstanceJoined", "decode instance b:1 of chat"),
    ]
    assert [event["reason"] for event in api.events[2:]] == ["InstanceFenced"]
    assert "b:1 of chat was lost" in api.events[2]["message"]


def test_what_happens_to_instances_is_told_once() -> None:
    seen = Instances()
    a, b = instance("a:1"), instance("b:1")
    reasons = lambda instances: [notice.reason for notice in seen.look(instances)]  # noqa: E731
    assert reasons([a, b]) == ["InstanceJoined", "InstanceJoined"]
    assert reasons([a, b]) == []
    assert reasons([a, instance("b:1", leaving=True)]) == ["InstanceDraining"]
    assert reasons([a]) == []
    assert reasons([a]) == ["InstanceDrained"]
    assert reasons([]) == [], "a scheduler that has just started knows nobody yet"
    assert reasons([a]) == []
    assert reasons([]) == []
    assert reasons([]) == ["InstanceFenced"]
    assert reasons([instance("a:1", defect="block 3 is free twice")]) == ["InstanceJoined", "InstanceDefect"]


def test_an_event_is_about_the_service(api: FakeApi, owner: Owner) -> None:
    owner.tell(
        Notice("Warning", "InstanceFenced", "decode instance a:1 was lost"),
        datetime(2026, 11, 21, tzinfo=UTC),
    )
    [event] = api.events
    assert event["involvedObject"] == {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "name": "demo-baton",
        "namespace": "llm",
        "uid": "s",
    }
    assert (event["type"], event["reason"]) == ("Warning", "InstanceFenced")
    assert event["metadata"]["generateName"] == "demo-baton-"


def test_without_kuberay_an_event_is_about_the_heads_set(api: FakeApi) -> None:
    api.put("leaderworkersets", {"metadata": {"name": "demo-baton-head", "uid": "h"}, "spec": {}})
    with api.serving() as url:
        configuration = client.Configuration(host=url)
        owner = Owner(client.ApiClient(configuration), "llm", "LeaderWorkerSet", "demo-baton-head")
        owner.tell(
            Notice("Normal", "InstanceJoined", "decode instance a:1 takes requests"), datetime.now(UTC)
        )
    [event] = api.events
    about = event["involvedObject"]
    assert (about["apiVersion"], about["kind"], about["uid"]) == (
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        "h",
    )
