"""Many models behind one endpoint: each row of `config.models` has pods of its own, and no replica could land on another's."""

from typing import Any

import pytest
from helm_python import HelmError

from cluster.deploy.kube.worker_groups import offered_resources
from cluster.deploy.rank_bundles import bundles_of, strategy_of
from cluster.deploy.serve_file import check_serve_file
from core.config.cluster_config import ClusterConfig, load
from tests.charts.rendering import (
    Object,
    cluster_spec,
    container,
    deployed_pools,
    example,
    num_replicas,
    of_kind,
    pods,
    render,
    serve_config,
)
from tests.charts.schemas import check, check_pod
from tests.charts.test_model_fetch import run as run_command
from tests.charts.test_notes import notes

SELDOM: Object = {
    "path": "embedded",
    "prefill_instances": 0,
    "schedule": {"residency": {"mode": "on_demand", "group": "card", "level": 2}},
}
TABLE: Object = {
    "models": {
        "code": "embedded",
        "Qwen/Qwen3-8B": {
            "path": "embedded",
            "aliases": ["gpt-4o"],
            "prefill_instances": 0,
            "any_role": True,
            "decode_instances": 3,
            "cpus_per_instance": 1,
            "decode": {"tp": 1, "pp": 2},
        },
        "chat": SELDOM,
        "draft": SELDOM,
    },
    "residency_groups": {"card": {"awake_models": 1}},
    "decode": {"tp": 2},
    "prefill_instances": 2,
    "cpus_per_instance": 0.5,
}
PLAIN: Object = {"models": {"code": "embedded", "chat": {"path": "embedded"}}}
CASES: dict[str, Object] = {
    "of every kind": {"config": TABLE},
    "without kuberay": {"config": TABLE, "kind": "LeaderWorkerSet"},
    "several in a pod": {"config": {**TABLE, "decode_instances": 5}, "decode": {"instancesPerPod": 2}},
    "two rows": {"config": PLAIN},
    "on shared cards": {
        "config": {
            "models": {
                "code": {"path": "embedded", "prefill": {"gpu_share": 0.5}, "decode": {"gpu_share": 0.5}},
                "chat": "embedded",
            },
            "engine": {"device": "cuda"},
        },
        "prefill": {"gpusPerPod": 4},
        "decode": {"gpusPerPod": 1},
    },
    "on several hosts": {
        "config": {
            "models": {"code": {"path": "embedded", "decode": {"ep": 16, "hosts": 2}}, "b": "embedded"}
        },
        "prefill": {"gpusPerPod": 1},
        "decode": {"gpusPerPod": 1},
        "modelPods": {"code": {"decode": {"gpusPerPod": 8}}},
    },
}


def objects_of(name: str) -> list[Object]:
    return example(name) if name == "many-models" else render(CASES[name])


def groups_of(objects: list[Object]) -> dict[str, Object]:
    return {group["groupName"]: group for group in cluster_spec(objects)["workerGroupSpecs"]}


def bundles(deployment: Object) -> list[dict[str, float]]:
    """What the replica asks of Ray, or its ranks."""
    if asked := deployment.get("placement_group_bundles"):
        return asked
    options = deployment["ray_actor_options"]
    alone = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options["resources"]}
    return [{name: amount for name, amount in alone.items() if amount}]


def room_in(group: Object) -> dict[str, float]:
    """What a pod of the group offers beside CPUs, of which a pod without requests has its node's."""
    limits = container(group["template"])["resources"].get("limits", {})
    gpus = group["rayStartParams"].get("num-gpus") or limits.get("nvidia.com/gpu", 0)
    return {**offered_resources(group), "GPU": float(gpus)}


@pytest.mark.parametrize("name", ["many-models", *CASES])
def test_each_rows_replicas_fit_in_its_own_pods_and_could_land_on_no_others(name: str) -> None:
    objects = objects_of(name)
    [application] = serve_config(objects)["applications"]
    groups, numbers = groups_of(objects), num_replicas(application)
    assert {one["name"] for one in application["deployments"]} == set(numbers)
    taken = {group: dict.fromkeys(room_in(spec), 0.0) for group, spec in groups.items()}
    for deployment in application["deployments"]:
        [bundle, *others] = asked = bundles(deployment)
        assert all(other == bundle for other in others)
        where = [
            group
            for group, spec in groups.items()
            if all(room_in(spec).get(key, 0) >= bundle[key] for key in bundle if key != "CPU")
        ]
        assert len(where) == 1, f"{deployment['name']}: {where}"
        for key, amount in bundle.items():
            if key != "CPU":
                taken[where[0]][key] += amount * len(asked) * numbers[deployment["name"]]
    for group, spec in groups.items():
        for key, amount in room_in(spec).items():
            assert taken[group][key] <= amount * spec["replicas"], (group, key)
    for models, _, deployment in deployed_pools(application):
        [group] = [one for one in groups if set(offered_resources(groups[one])) & set(bundles(deployment)[0])]
        own = groups[group]["template"]["metadata"]["labels"]["baton/model"]
        assert own == models.name.lower().replace("/", "-")


@pytest.mark.parametrize("name", ["many-models", *CASES])
def test_every_object_of_a_table_is_valid_and_batons_own_loader_takes_it(name: str) -> None:
    objects = objects_of(name)
    for made in objects:
        check(made)
    for template in pods(objects).values():
        check_pod(template)
    schema, configs = check_serve_file(serve_config(objects))
    assert [application.name for application in schema.applications] == ["baton"]
    assert len(configs["baton"].rows) >= 2
    names = [(made["kind"], made["metadata"]["name"]) for made in objects]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["many-models", *CASES])
def test_each_pool_asks_for_what_its_row_says(name: str) -> None:
    """The chart lays a row over the rest for its sizes; the server's own configuration says whether that was right."""
    objects = objects_of(name)
    [application] = serve_config(objects)["applications"]
    for models, role, deployment in deployed_pools(application):
        row = models.first
        mesh = getattr(row, role)
        if mesh.num_ranks == 1:
            assert deployment["ray_actor_options"]["num_cpus"] == row.cpus_per_instance
            continue
        asked = deployment["placement_group_bundles"]
        assert [each["CPU"] for each in asked] == [each["CPU"] for each in bundles_of(row, mesh)]
        assert deployment["placement_group_strategy"] == strategy_of(mesh)


def test_the_table_is_handed_on_as_it_was_written() -> None:
    """One text for `baton serve`, a Serve file and the chart."""
    [application] = serve_config(render({"config": TABLE}))["applications"]
    assert application["args"]["models"] == TABLE["models"]
    written = load(TABLE, {})
    deployed = ClusterConfig.model_validate(application["args"])
    for row in written.rows:
        [same] = [one for one in deployed.rows if one.model.name == row.model.name]
        for key in ("model", "engine", "prefill", "decode", "prefill_instances", "decode_instances"):
            assert getattr(same, key) == getattr(row, key)


def test_one_service_one_endpoint_and_one_group_of_pods_with_ingresses() -> None:
    objects = example("many-models")
    services = [one for one in of_kind(objects, "Service") if not one.endswith("-preflight")]
    assert services == ["demo-baton"]
    assert set(groups_of(objects)) == {
        "ingress",
        "chat-prefill",
        "chat-decode",
        "qwen-qwen3-8b-prefill",
        "qwen-qwen3-8b-decode",
        "seldom-decode",
    }
    selector = of_kind(objects, "Service")["demo-baton"]["spec"]["selector"]
    chosen = [
        group
        for group, template in pods(objects).items()
        if selector.items() <= template["metadata"]["labels"].items()
    ]
    assert chosen == ["ingress"]
    monitor = of_kind(objects, "PodMonitor")["demo-baton"]["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= pods(objects)["ingress"]["metadata"]["labels"].items()
    [controller] = of_kind(objects, "Deployment").values()
    [one] = controller["spec"]["template"]["spec"]["containers"]
    assert [part for part in one["command"] if "endpoint" in part] == ["--endpoint=http://demo-baton:80"]
    assert "-255 seconds" in one["livenessProbe"]["exec"]["command"][-1], "four models that do not answer"


def test_processors_bound_no_number_of_models() -> None:
    """A pod with ingresses has two, and each model has two schedulers and their next versions there."""
    models = {f"m{number}": "embedded" for number in range(30)}
    objects = render({"config": {"models": models}})
    [application] = serve_config(objects)["applications"]
    small = [one for one in application["deployments"] if "Pool" not in one["name"]]
    assert len(small) == 31
    assert {one["ray_actor_options"]["num_cpus"] for one in small} == {0}
    assert offered_resources(groups_of(objects)["ingress"]) == {"ingress": 2 * (1 + 30)}


def test_rows_of_a_group_share_pods_with_shared_memory_for_those_that_are_awake() -> None:
    engines = [{"kv_bytes": size << 30} for size in (1, 3, 2)]
    rows = {f"m{n}": {**SELDOM, "engine": engine} for n, engine in enumerate(engines)}
    config = {"models": rows, "residency_groups": {"card": {"awake_models": 2}}}
    made = groups_of(render({"config": config}))
    assert set(made) == {"ingress", "card-decode"}
    [shm] = [one for one in made["card-decode"]["template"]["spec"]["volumes"] if one["name"] == "shm"]
    assert 0 <= int(shm["emptyDir"]["sizeLimit"]) - (5 << 30) < 2 << 30
    rows["m0"] = SELDOM
    [open_end] = [
        one
        for one in groups_of(render({"config": config}))["card-decode"]["template"]["spec"]["volumes"]
        if one["name"] == "shm"
    ]
    assert open_end["emptyDir"] == {"medium": "Memory"}, "what the pod's limit leaves"


def test_pods_of_a_row_are_as_all_are_unless_it_says_otherwise() -> None:
    values = {
        "config": PLAIN,
        "decode": {"nodeSelector": {"zone": "a"}, "resources": {"limits": {"memory": "4Gi"}}},
        "modelPods": {
            "chat": {"decode": {"nodeSelector": {"zone": "b"}, "minReplicas": 0, "maxReplicas": 3}}
        },
    }
    made = groups_of(render(values))
    assert made["code-decode"]["template"]["spec"]["nodeSelector"] == {"zone": "a"}
    assert made["chat-decode"]["template"]["spec"]["nodeSelector"] == {"zone": "b"}
    assert container(made["chat-decode"]["template"])["resources"]["limits"]["memory"] == "4Gi"
    assert (made["chat-decode"]["minReplicas"], made["chat-decode"]["maxReplicas"]) == (0, 3)
    assert (made["code-decode"]["minReplicas"], made["code-decode"]["maxReplicas"]) == (1, 1)
    spread = made["chat-decode"]["template"]["spec"]["topologySpreadConstraints"][0]["labelSelector"]
    assert spread["matchLabels"]["baton/model"] == "chat"


def test_budgets_and_claims_are_of_rows() -> None:
    pod = {"gpusPerPod": 2, "gpuDeviceClass": "gpu.nvidia.com", "imex": True}
    config = {"models": {"code": {"path": "embedded", "decode_instances": 6}, "chat": "embedded"}}
    objects = render({"config": config, "prefill": pod, "decode": pod})
    budget = of_kind(objects, "PodDisruptionBudget")["demo-baton-code-decode"]["spec"]
    assert budget["minAvailable"] == 2
    assert (
        budget["selector"]["matchLabels"].items()
        <= pods(objects)["code-decode"]["metadata"]["labels"].items()
    )
    assert "demo-baton-chat-decode" not in of_kind(objects, "PodDisruptionBudget"), "one pod"
    assert set(of_kind(objects, "ComputeDomain")) == {"demo-baton-code", "demo-baton-chat"}
    templates = set(of_kind(objects, "ResourceClaimTemplate")) | {
        "demo-baton-code-imex",
        "demo-baton-chat-imex",
    }
    for name in ("code-decode", "chat-prefill"):
        for claim in pods(objects)[name]["spec"]["resourceClaims"]:
            assert claim["resourceClaimTemplateName"] in templates


def test_names_of_any_model_become_dns_labels() -> None:
    names = ["1.5", "meta-llama/Llama-3.3-70B-Instruct", "on", "A_b:c-"]
    objects = render({"config": {"models": dict.fromkeys(names, "embedded")}})
    groups = groups_of(objects)
    assert {"1-5-decode", "on-decode", "a-b-c-decode"} <= set(groups)
    [long] = [name for name in groups if name.startswith("meta-llama-llama") and name.endswith("decode")]
    assert len(long.removesuffix("-decode")) <= 22
    for template in pods(objects).values():
        check_pod(template)
    [application] = serve_config(objects)["applications"]
    check_serve_file(serve_config(objects))
    assert "DecodePool-meta-llama-Llama-3.3-70B-Instruct" in num_replicas(application)


FETCHED: Object = {
    "config": {
        "models": {
            "code": {"path": "owner/large", "engine": {"speculate": "draft:owner/small"}},
            "chat": {**SELDOM, "path": "owner/chat"},
            "draft": {**SELDOM, "path": "owner/draft"},
        },
        "residency_groups": {"card": {"awake_models": 1}},
    },
    "modelCache": {"enabled": True, "fetch": {"enabled": True}},
}


def test_the_job_fetches_every_rows_path_and_pods_wait_for_their_own(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "cluster.deploy.kube.model_files.resolve", lambda path: asked.append(path) or tmp_path
    )
    objects = render(FETCHED)
    [job] = of_kind(objects, "Job").values()
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    waits = {
        group: [
            "--timeout-s=0" if "timeout" in part else part
            for part in template["spec"]["initContainers"][0]["command"]
        ]
        for group, template in pods(objects).items()
        if group != "head"
    }
    volume = tmp_path / "volume" / "baton-fetched"
    volume.mkdir(parents=True)
    for model in ("large", "small"):
        (volume / f"owner%2F{model}").touch()
    ready = {name: run_command(wait, tmp_path, objects, monkeypatch) == 0 for name, wait in waits.items()}
    assert ready == {"ingress": False, "code-prefill": True, "code-decode": True, "card-decode": False}
    assert run_command(command, tmp_path, objects, monkeypatch) == 0
    assert sorted(asked) == ["owner/chat", "owner/draft"]
    assert not any(run_command(wait, tmp_path, objects, monkeypatch) for wait in waits.values())
    other = {
        **FETCHED,
        "config": {**FETCHED["config"], "models": {**FETCHED["config"]["models"], "x": "owner/x"}},
    }
    assert set(of_kind(render(other), "Job")) != set(of_kind(objects, "Job"))


def test_preflight_checks_the_nodes_of_each_kind_of_pod_once() -> None:
    gpus = {"gpusPerPod": 2}
    values = {
        "config": {"models": dict.fromkeys("abc", "embedded")},
        "prefill": gpus,
        "decode": gpus,
        "modelPods": {"b": {"decode": {"nodeSelector": {"gpu": "small"}}}},
        "preflight": {"job": True},
    }
    jobs = of_kind(render(values), "Job")
    assert set(jobs) == {"demo-baton-a-preflight", "demo-baton-b-preflight"}
    assert jobs["demo-baton-b-preflight"]["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "small"}


def test_keda_sizes_the_rows_that_follow_their_load_by_their_own_metric() -> None:
    rows = {**TABLE["models"], "code": {"path": "embedded", "scaling": {"enabled": True}}}
    values = {
        "kind": "LeaderWorkerSet",
        "config": {**TABLE, "models": rows},
        "keda": {"enabled": True, "prometheus": "http://prometheus:9090"},
    }
    objects = render(values)
    scaled = of_kind(objects, "ScaledObject")
    assert set(scaled) == {"demo-baton-code-prefill", "demo-baton-code-decode"}
    [trigger] = scaled["demo-baton-code-decode"]["spec"]["triggers"]
    assert 'baton_model="baton",model="code",pool="decode"' in trigger["metadata"]["query"]
    sets = of_kind(objects, "LeaderWorkerSet")
    assert "replicas" not in sets["demo-baton-code-decode"]["spec"]
    assert sets["demo-baton-qwen-qwen3-8b-decode"]["spec"]["replicas"] == 3
    assert serve_config(objects)["applications"][0]["external_scaler_enabled"] is True
    check_serve_file(serve_config(objects))
    with pytest.raises(HelmError, match=r"without config\.scaling\.enabled"):
        render({**values, "config": TABLE})


def test_notes_name_the_rows_pods_without_a_memory_limit() -> None:
    said = notes({"config": PLAIN, "prefill": {"resources": {"limits": {"memory": "8Gi"}}}})
    assert "These pods have no memory limit: chat-decode, code-decode." in said
