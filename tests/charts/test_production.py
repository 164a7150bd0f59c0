"""The example to begin a production release with: nothing in it is there only once, open or unbounded."""

import pytest

from core.config.cluster_config import ClusterConfig
from tests.charts.rendering import (
    Object,
    all_pods,
    cluster_spec,
    container,
    example,
    of_kind,
    pods,
    serve_config,
)


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return example("production")


def test_two_ingresses_and_two_schedulers_run_on_two_nodes(objects: list[Object]) -> None:
    [application] = serve_config(objects)["applications"]
    config = ClusterConfig.model_validate(application["args"])
    assert config.ingress_instances >= 2
    assert config.serve.schedulers >= 2
    groups = {group["groupName"]: group for group in cluster_spec(objects)["workerGroupSpecs"]}
    assert groups["ingress"]["replicas"] >= 2
    spread = groups["ingress"]["template"]["spec"]["topologySpreadConstraints"]
    assert any(
        one["topologyKey"] == "kubernetes.io/hostname" and one["whenUnsatisfiable"] == "DoNotSchedule"
        for one in spread
    ), "one node's end leaves an ingress"
    assert all(group["replicas"] >= 2 for group in groups.values())
    assert {"demo-baton-ingress", "demo-baton-prefill", "demo-baton-decode"} == set(
        of_kind(objects, "PodDisruptionBudget")
    )


def test_every_container_has_requests_and_limits(objects: list[Object]) -> None:
    templates = all_pods(objects)
    assert len(templates) == 7, "head, ingress, prefill, decode, controller, fetch, Valkey"
    for template in templates:
        for one in [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]:
            resources = one["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), one["name"]
            assert "memory" in resources["limits"], one["name"]
    for template in pods(objects).values():
        resources = container(template)["resources"]
        assert resources["limits"]["memory"] == resources["requests"]["memory"]
        assert "ephemeral-storage" in resources["limits"]


def test_the_head_may_restart_models_are_on_a_volume_and_the_store_is_a_database(
    objects: list[Object],
) -> None:
    assert "redisAddress" in cluster_spec(objects)["gcsFaultToleranceOptions"]
    assert of_kind(objects, "StatefulSet")
    claims = of_kind(objects, "PersistentVolumeClaim").values()
    assert {claim["metadata"]["name"] for claim in claims} == {"demo-baton-models"}
    [application] = serve_config(objects)["applications"]
    assert application["args"]["serve"]["store_file"] == "/etc/baton/store/url"
    assert all(claim["spec"]["accessModes"] == ["ReadWriteMany"] for claim in claims)
    assert of_kind(objects, "Job"), "fetches the model"


def test_each_policy_names_the_namespaces_of_those_outside(objects: list[Object]) -> None:
    policies = of_kind(objects, "NetworkPolicy").values()
    assert any("Egress" in policy["spec"]["policyTypes"] for policy in policies)
    for policy in policies:
        rules = [*policy["spec"].get("ingress", []), *policy["spec"].get("egress", [])]
        for rule in rules:
            peers = rule.get("from", rule.get("to"))
            assert peers, f"{policy['metadata']['name']}: everybody"
            assert {} not in [peer.get("namespaceSelector") for peer in peers], policy["metadata"]["name"]


def test_nothing_secret_is_made_by_templates_but_what_stays_inside(objects: list[Object]) -> None:
    assert set(of_kind(objects, "Secret")) == {"demo-baton-valkey"}
    assert of_kind(objects, "PodMonitor")
    assert of_kind(objects, "PrometheusRule")
