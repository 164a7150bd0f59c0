"""What the chart promises of a cluster, asserted on the rendered objects: places, sizes, probes, ends, upgrades, checks."""

import json
from collections import Counter

import pytest
import yaml
from helm_python import HelmError

from cluster.deploy.kube.worker_groups import offered_resources
from cluster.deploy.rank_bundles import BundleShare, shares
from core.config.cluster_config import ClusterConfig, overlay
from tests.charts.rendering import (
    CHART,
    EXAMPLES,
    Object,
    all_pods,
    cluster_spec,
    container,
    example,
    num_replicas,
    of_kind,
    pods,
    render,
    selects,
    serve_config,
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_serve_asks_for_the_groups_have(name: str) -> None:
    objects = example(name)
    offered: Counter[str] = Counter()
    for group in cluster_spec(objects)["workerGroupSpecs"]:
        num_pods = group["replicas"] * group.get("numOfHosts", 1)
        limits = container(group["template"])["resources"].get("limits", {})
        for resource, number in offered_resources(group).items():
            offered[resource] += number * num_pods
        num_gpus = int(group["rayStartParams"].get("num-gpus", 0)) or limits.get("nvidia.com/gpu", 0)
        offered["GPU"] += num_gpus * num_pods
    asked: Counter[str] = Counter()
    for application in serve_config(objects)["applications"]:
        numbers = num_replicas(application)
        assert set(numbers) == {deployment["name"] for deployment in application["deployments"]}
        for deployment in application["deployments"]:
            number = numbers[deployment["name"]]
            options = deployment["ray_actor_options"]
            alone = options.get("resources", {}) | {"GPU": options.get("num_gpus", 0)}
            for bundle in deployment.get("placement_group_bundles") or [alone]:
                asked.update({resource: n * number for resource, n in bundle.items() if resource != "CPU"})
    assert {resource: n for resource, n in asked.items() if n > offered[resource]} == {}
    assert asked["GPU"] == offered["GPU"]


def test_there_are_two_schedulers_unless_told_otherwise() -> None:
    for given, number in (({}, 2), ({"serve": {"schedulers": 1}}, 1)):
        [application] = serve_config(render({"config": given}))["applications"]
        assert application["args"]["serve"]["schedulers"] == number
    [group] = [one for one in cluster_spec(render({}))["workerGroupSpecs"] if one["groupName"] == "ingress"]
    assert (group["replicas"], offered_resources(group)) == (2, {"ingress": 4}), (
        "each pod: an ingress, a scheduler, and their next versions"
    )


@pytest.mark.parametrize(("schedulers", "offered"), [(1, 4), (2, 4), (3, 6)])
def test_the_pods_with_ingresses_have_room_for_all_schedulers_twice(schedulers: int, offered: int) -> None:
    objects = render({"config": {"ingress_instances": 2, "serve": {"schedulers": schedulers}}})
    [group] = [one for one in cluster_spec(objects)["workerGroupSpecs"] if one["groupName"] == "ingress"]
    assert (group["replicas"], offered_resources(group)) == (2, {"ingress": offered})


def test_gpus_rdma_and_shared_memory_of_a_pool() -> None:
    objects = example("h200-rdma")
    groups = {group["groupName"]: group for group in cluster_spec(objects)["workerGroupSpecs"]}
    decode = container(groups["decode"]["template"])
    assert decode["resources"]["limits"] == {
        "memory": "1600Gi",
        "ephemeral-storage": "20Gi",
        "nvidia.com/gpu": 8,
        "rdma/hca_shared_devices_a": 1,
    }
    assert decode["resources"]["requests"]["rdma/hca_shared_devices_a"] == 1
    assert decode["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    [shm] = [v for v in groups["decode"]["template"]["spec"]["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory"}, "pools take what the pod's memory limit leaves"
    assert groups["decode"]["template"]["spec"]["hostNetwork"] is True
    assert "hostNetwork" not in groups["prefill"]["template"]["spec"]
    assert (groups["prefill"]["replicas"], groups["decode"]["replicas"]) == (1, 2)
    head = container(pods(objects)["head"])
    assert "add" not in head["securityContext"]["capabilities"]


def test_an_instance_has_a_gpu_and_cpus_for_each_of_its_ranks() -> None:
    objects = example("tp8-ep16")
    [application] = serve_config(objects)["applications"]
    config = ClusterConfig.model_validate(application["args"])
    deployments = {one["name"]: one for one in application["deployments"]}
    for name, mesh, bundles in (("PrefillPool", config.prefill, 1), ("DecodePool", config.decode, 16)):
        asked = deployments[name]["placement_group_bundles"]
        assert deployments[name]["placement_group_strategy"] == ("STRICT_PACK" if mesh.hosts == 1 else "PACK")
        assert deployments[name]["ray_actor_options"] == {"num_cpus": 0}
        assert len(asked) == bundles
        assert shares(asked, mesh.num_ranks) == [
            BundleShare(rank // mesh.tp, config.cpus_per_instance, 1) for rank in range(mesh.num_ranks)
        ]
    groups = {group["groupName"]: group for group in cluster_spec(objects)["workerGroupSpecs"]}
    assert [groups[name]["replicas"] for name in ("prefill", "decode")] == [2, 2]
    assert [offered_resources(groups[name]) for name in ("prefill", "decode")] == [
        {"prefill": 1},
        {"decode": 8},
    ]
    mesh = {"decode_instances": 5, "decode": {"tp": 2}, "engine": {"kv_bytes": 8 << 30}}
    several = render({"config": mesh, "decode": {"gpusPerPod": 8}})
    [decode] = [one for one in cluster_spec(several)["workerGroupSpecs"] if one["groupName"] == "decode"]
    assert (decode["replicas"], offered_resources(decode)) == (2, {"decode": 4})
    [shm] = [v for v in decode["template"]["spec"]["volumes"] if v["name"] == "shm"]
    assert 0 <= int(shm["emptyDir"]["sizeLimit"]) - 4 * (8 << 30) < 2 << 30, (
        "an instance's ranks share kv_bytes"
    )


def test_an_instance_may_span_pods_of_several_hosts() -> None:
    mesh = {"tp": 4, "pp": 4, "hosts": 2}
    objects = render({"config": {"decode_instances": 3, "decode": mesh}, "decode": {"gpusPerPod": 8}})
    [decode] = [one for one in cluster_spec(objects)["workerGroupSpecs"] if one["groupName"] == "decode"]
    assert (decode["replicas"], offered_resources(decode)) == (6, {"decode": 2})
    assert container(decode["template"])["resources"]["limits"]["nvidia.com/gpu"] == 8
    [application] = serve_config(objects)["applications"]
    [pool] = [one for one in application["deployments"] if one["name"] == "DecodePool"]
    assert pool["placement_group_strategy"] == "PACK"
    assert len(pool["placement_group_bundles"]) == 4


def test_pods_are_placed_as_the_values_say() -> None:
    spec = pods(example("h200-rdma"))["decode"]["spec"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
    [spread] = spec["topologySpreadConstraints"]
    assert spread["topologyKey"] == "topology.kubernetes.io/rack"
    assert spread["labelSelector"]["matchLabels"]["baton/role"] == "decode"


def test_ready_and_alive_are_two_questions() -> None:
    made = pods(render({"config": {"serve": {"port": 9000}}}))
    ingress = container(made["ingress"])
    assert ingress["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http", "scheme": "HTTP"}
    assert {"name": "http", "containerPort": 9000} in ingress["ports"]
    for template in made.values():
        ray = container(template)
        assert ray["livenessProbe"]["httpGet"]["path"] == "/api/healthz"
        assert ray["startupProbe"]["failureThreshold"] * ray["startupProbe"]["periodSeconds"] >= 600
    assert container(made["head"])["readinessProbe"]["httpGet"]["path"] == "/api/healthz"


def test_a_pod_has_the_longest_requests_time_to_leave() -> None:
    values = {
        "config": {"serve": {"request_timeout_s": 900, "drain_timeout_s": 120.5, "drain_notice_s": 4}},
        "models": {"quick": {"config": {"serve": {"request_timeout_s": 30}}}},
    }
    for template in pods(render(values)).values():
        hook = container(template)["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[-2:] == ["--timeout-s", "1025"]
        assert template["spec"]["terminationGracePeriodSeconds"] > 1025


def test_an_ingress_answers_until_no_node_sends_it_connections_any_more() -> None:
    objects = render()
    probe = container(pods(objects)["ingress"])["readinessProbe"]
    [application] = serve_config(objects)["applications"]
    notice_s = application["args"]["serve"]["drain_notice_s"]
    assert notice_s >= probe["periodSeconds"] * probe["failureThreshold"] + 5, (
        "endpoints change in a second or two"
    )
    hook = container(pods(objects)["ingress"])["lifecycle"]["preStop"]["exec"]["command"]
    assert int(hook[-1]) == 600 + notice_s + 30
    said = serve_config(render({"config": {"serve": {"drain_notice_s": 25}}}))["applications"]
    assert said[0]["args"]["serve"]["drain_notice_s"] == 25


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_policy_and_service_selects_pods_that_exist(name: str) -> None:
    objects = example(name)
    labels = [template["metadata"]["labels"] for template in all_pods(objects)]
    for made in objects:
        match made["kind"]:
            case "Service":
                selector = made["spec"]["selector"]
            case "NetworkPolicy":
                assert any(selects(made["spec"]["podSelector"], one) for one in labels), made["metadata"][
                    "name"
                ]
                continue
            case "PodDisruptionBudget" | "PodMonitor":
                selector = made["spec"]["selector"]["matchLabels"]
            case _:
                continue
        assert any(selector.items() <= one.items() for one in labels), made["metadata"]["name"]


def test_the_service_has_the_ingress_pods_of_its_model_alone() -> None:
    objects = example("multi-model")
    services = of_kind(objects, "Service")
    for service, group in (("demo-baton", "ingress"), ("demo-baton-qwen", "qwen-ingress")):
        selector = services[service]["spec"]["selector"]
        chosen = {
            name
            for name, template in pods(objects).items()
            if selector.items() <= template["metadata"]["labels"].items()
        }
        assert chosen == {group}


def test_evictions_take_one_pod_of_a_group_at_a_time_and_never_the_head() -> None:
    """Kubernetes asks a RayCluster for its scale where a budget says anything but a number that stays, and gets no answer."""
    sizes = {"ingress_instances": 2, "prefill_instances": 1, "decode_instances": 4}
    budgets = of_kind(render({"config": sizes}), "PodDisruptionBudget")
    assert {name: one["spec"].get("minAvailable") for name, one in budgets.items()} == {
        "demo-baton-head": 1,
        "demo-baton-ingress": 1,
        "demo-baton-decode": 3,
    }
    assert not any("maxUnavailable" in one["spec"] for one in budgets.values())
    assert "demo-baton-head" not in of_kind(example("ray-cluster"), "PodDisruptionBudget"), (
        "its state is kept elsewhere"
    )
    smaller = render({"config": sizes, "decode": {"minReplicas": 3, "maxReplicas": 8}})
    assert of_kind(smaller, "PodDisruptionBudget")["demo-baton-decode"]["spec"]["minAvailable"] == 2
    off = render({"config": sizes, "decode": {"podDisruptionBudget": False}})
    assert "demo-baton-decode" not in of_kind(off, "PodDisruptionBudget")


def test_classes_and_tenants_change_without_a_new_pod() -> None:
    def made(tokens: int) -> list[Object]:
        tenant = {"keys_file": "/etc/tenants/a", "max_tokens_per_min": tokens}
        return render({"live": {"tenants": {"a": tenant}, "slo_classes": {"fast": {"ttft_s": 0.2}}}})

    before, after = made(100), made(200)
    assert [one for one in before if one["kind"] == "RayService"] == [
        one for one in after if one["kind"] == "RayService"
    ]
    text = of_kind(after, "ConfigMap")["demo-baton-live"]["data"]["live.yaml"]
    [application] = serve_config(after)["applications"]
    assert application["args"]["serve"]["live_file"] == "/etc/baton/live/live.yaml"
    live = overlay(ClusterConfig.model_validate(application["args"]), yaml.safe_load(text))
    assert (live.tenants["a"].max_tokens_per_min, live.slo_classes["fast"].ttft_s) == (200, 0.2)


def test_streams_pass_what_is_in_front() -> None:
    values = {
        "config": {"serve": {"request_timeout_s": 1234.5}},
        "expose": {
            "ingress": {"enabled": True, "host": "a.example"},
            "route": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
        },
    }
    objects = render(values)
    ingress = of_kind(objects, "Ingress")["demo-baton"]
    notes = {key.split("/")[1]: value for key, value in ingress["metadata"]["annotations"].items()}
    assert (notes["proxy-buffering"], notes["proxy-read-timeout"]) == ("off", "1235")
    paths = ingress["spec"]["rules"][0]["http"]["paths"]
    assert [path["path"] for path in paths] == ["/v1"], "metrics and the cluster's state stay inside"
    [rule] = of_kind(objects, "HTTPRoute")["demo-baton"]["spec"]["rules"]
    assert rule["timeouts"] == {"request": "1235s", "backendRequest": "1235s"}


def test_an_upgrade_starts_a_second_cluster() -> None:
    service = of_kind(render(), "RayService")["demo-baton"]["spec"]
    assert service["upgradeStrategy"] == {"type": "NewCluster"}
    assert service["excludeHeadPodFromServeSvc"] is True


def test_a_job_deploys_to_a_cluster_that_nothing_else_watches() -> None:
    """KubeRay holds a RayJob back until all pods are ready, and pods with ingresses are ready once there is an application."""
    objects = example("ray-cluster")
    assert not of_kind(objects, "RayJob")
    [job] = of_kind(objects, "Job").values()
    spec = job["spec"]["template"]["spec"]
    [deploy] = spec["containers"]
    assert deploy["command"][:4] == ["baton", "deploy", "--address", "http://demo-baton-head-svc:8265"]
    [mount] = [one for one in deploy["volumeMounts"] if one["name"] == "serve-config"]
    assert deploy["command"][-1] == f"{mount['mountPath']}/serve.yaml"
    assert {"name": "RAY_AUTH_MODE", "value": "token"} in deploy["env"]
    [volume] = [one for one in spec["volumes"] if one["name"] == "serve-config"]
    assert volume["configMap"]["name"] in of_kind(objects, "ConfigMap")
    everybody = of_kind(objects, "NetworkPolicy")["demo-baton"]["spec"]["podSelector"]["matchLabels"]
    assert everybody.items() <= job["spec"]["template"]["metadata"]["labels"].items(), "it may reach the head"


def test_another_configuration_or_image_is_another_job() -> None:
    names = {
        name
        for values in ({}, {"config": {"decode_instances": 2}}, {"image": {"tag": "next"}})
        for name in of_kind(render({"kind": "RayCluster", **values}), "Job")
    }
    assert len(names) == 3


def test_nodes_and_links_are_checked_before_anything_serves() -> None:
    objects = example("h200-rdma")
    for name in ("prefill", "decode"):
        first = pods(objects)[name]["spec"]["initContainers"][0]
        assert first["command"][-4:] == ["--instances", "4", "--pool", name]
        assert first["resources"]["limits"]["nvidia.com/gpu"] == 8
    job = of_kind(objects, "Job")["demo-baton-preflight"]
    hooks = job["metadata"]["annotations"]["helm.sh/hook"]
    assert set(hooks.split(",")) == {"pre-install", "pre-upgrade"}
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (
        "Indexed",
        4,
        4,
        0,
    )
    [check] = spec["template"]["spec"]["containers"]
    assert check["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert {"name": "BATON_TRANSFER__TRANSPORT", "value": "auto"} in check["env"]
    headless = of_kind(objects, "Service")["demo-baton-preflight"]["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert spec["template"]["spec"]["subdomain"] == "demo-baton-preflight"


def test_dashboards_and_rules_arrive_as_they_were_written() -> None:
    objects = example("everything")
    files = CHART / "files"
    [rule] = of_kind(objects, "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load((files / "alerts.yaml").read_text())
    boards = of_kind(objects, "ConfigMap")["demo-baton-dashboards"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    written = {path.name: json.loads(path.read_text()) for path in (files / "dashboards").glob("*.json")}
    assert {name: json.loads(text) for name, text in boards["data"].items()} == written
    assert written


def test_instances_on_a_shared_card_are_in_one_pod_with_a_daemon_that_bounds_them() -> None:
    objects = example("shared-card")
    groups = {group["groupName"]: group for group in cluster_spec(objects)["workerGroupSpecs"]}
    assert sorted(groups) == ["decode", "ingress"]
    cards = groups["decode"]
    assert (cards["replicas"], offered_resources(cards)) == (2, {"decode": 1, "prefill": 1})
    ray = container(cards["template"])
    assert ray["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia-cuda-mps-control -d" in ray["lifecycle"]["postStart"]["exec"]["command"][-1]
    assert {"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/tmp/nvidia-mps"} in ray["env"]
    [application] = serve_config(objects)["applications"]
    asked = {one["name"]: one["ray_actor_options"] for one in application["deployments"]}
    assert asked["PrefillPool"] == {"num_cpus": 0.25, "num_gpus": 0.4, "resources": {"prefill": 1}}
    assert asked["DecodePool"] == {"num_cpus": 0.25, "num_gpus": 0.6, "resources": {"decode": 1}}
    assert not [name for name in of_kind(objects, "PodDisruptionBudget") if name.endswith("prefill")]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "set decode.gpusPerPod to 1"),
        ({"decode": {"gpusPerPod": 1}, "prefill": {"gpusPerPod": 8}}, "leave prefill out"),
    ],
)
def test_pods_of_shared_cards_are_described_once(values: Object, why: str) -> None:
    shares = {"engine": {"device": "cuda"}, "prefill": {"gpu_share": 0.5}, "decode": {"gpu_share": 0.5}}
    with pytest.raises(HelmError, match=why):
        render({"config": shares, **values})
