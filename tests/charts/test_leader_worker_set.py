"""Without KubeRay: LeaderWorkerSets whose pods start Ray themselves, sized by KEDA."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from helm_python import HelmError
from ray.scripts.scripts import start

from cluster.deploy.kube.controller import parser
from cluster.ingress.telemetry.pool_metrics import pool_metrics
from core.reports import PoolStatus, Status
from tests.charts.rendering import Object, container, example, of_kind, pods, render
from tests.charts.schemas import check, check_pod

PLAIN: Object = {"kind": "LeaderWorkerSet"}
SCALED: Object = {
    "kind": "LeaderWorkerSet",
    "config": {"scaling": {"enabled": True}, "decode_instances": 4},
    "decode": {"instancesPerPod": 2, "minReplicas": 1, "maxReplicas": 8},
    "keda": {
        "enabled": True,
        "prometheus": "http://prometheus:9090",
        "authenticationRef": "token",
        "cooldownSeconds": 60,
    },
}


def ray_options(template: Object) -> dict[str, object]:
    """What Ray's own command line makes of the container's command."""
    _, _, command = container(template)["command"][-1].partition("exec ray start ")
    return start.make_context("start", shlex.split(command)).params


def test_every_group_is_a_set_and_no_object_of_kuberay_is_left() -> None:
    objects = render(PLAIN)
    assert not [made for made in objects if made["apiVersion"].startswith("ray.io")]
    sets = of_kind(objects, "LeaderWorkerSet")
    assert set(sets) == {f"demo-baton-{kind}" for kind in ("head", "ingress", "prefill", "decode")}
    for made in sets.values():
        check(made)
        check_pod(made["spec"]["leaderWorkerTemplate"]["workerTemplate"])
        assert made["spec"]["leaderWorkerTemplate"]["size"] == 1
    assert sets["demo-baton-ingress"]["spec"]["replicas"] == 2


def test_ray_takes_what_pods_start_it_with() -> None:
    made = pods(example("leader-worker-set"))
    head = ray_options(made["head"])
    assert (head["head"], head["port"], head["num_cpus"], head["block"]) == (True, 6379, 0, True)
    for group, resources in (
        ("ingress", {"ingress": 4}),
        ("prefill", {"prefill": 1}),
        ("decode", {"decode": 8}),
    ):
        options = ray_options(made[group])
        assert options["address"] == "demo-baton-head-svc:6379"
        assert json.loads(str(options["resources"])) == resources
        assert options["num_gpus"] == (None if group == "ingress" else 8)
        assert (options["dashboard_agent_listen_port"], options["metrics_export_port"]) == (52365, 8080)
    given = render({**PLAIN, "decode": {"rayStartParams": {"num-cpus": "7"}}})
    assert ray_options(pods(given)["decode"])["num_cpus"] == 7


def test_the_command_survives_the_shell(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\nfor one in "$@"; do echo "$one"; done\n')
    ray.chmod(0o755)
    made = pods(example("leader-worker-set"))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REDIS_PASSWORD": "with a space"}
    said = {
        group: subprocess.run(
            container(made[group])["command"], env=env, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for group in ("head", "decode")
    }
    assert '--resources={"decode":8}' in said["decode"]
    assert "--redis-password=with a space" in said["head"]


def test_the_pods_of_an_instance_that_spans_several_are_a_group() -> None:
    decode = of_kind(example("leader-worker-set"), "LeaderWorkerSet")["demo-baton-decode"]["spec"]
    assert decode["leaderWorkerTemplate"]["size"] == 2
    mesh = {"tp": 4, "pp": 4, "hosts": 2}
    values = {**PLAIN, "config": {"decode_instances": 3, "decode": mesh}, "decode": {"gpusPerPod": 8}}
    spec = of_kind(render(values), "LeaderWorkerSet")["demo-baton-decode"]["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)


def test_workers_wait_for_the_head_and_the_head_keeps_its_state_elsewhere() -> None:
    objects = example("leader-worker-set")
    made = pods(objects)
    service = of_kind(objects, "Service")["demo-baton-head-svc"]["spec"]
    assert service["selector"].items() <= made["head"]["metadata"]["labels"].items()
    assert service["publishNotReadyAddresses"] is True
    for group in ("ingress", "prefill", "decode"):
        first = made[group]["spec"]["initContainers"][0]
        assert "ray health-check --address demo-baton-head-svc:6379" in first["command"][-1]
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in first["env"]
    env = {one["name"]: one for one in container(made["head"])["env"]}
    assert env["RAY_REDIS_ADDRESS"]["value"] == "demo-baton-valkey:6379"
    assert env["REDIS_PASSWORD"]["valueFrom"]["secretKeyRef"]["name"] == "demo-baton-valkey"
    workers = {one["name"] for one in container(made["decode"])["env"]}
    assert "REDIS_PASSWORD" not in workers
    assert "RAY_gcs_rpc_server_reconnect_timeout_s" in workers, "a head that restarts is waited for"


def test_a_job_deploys_and_the_controller_writes_events_on_the_head() -> None:
    objects = render(PLAIN)
    [job] = of_kind(objects, "Job").values()
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][:2] == ["baton", "deploy"]
    [deployment] = of_kind(objects, "Deployment").values()
    command = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    told = parser().parse_args(command[3:])
    assert (told.kind, told.name) == ("LeaderWorkerSet", "demo-baton-head")
    [role] = of_kind(objects, "Role").values()
    assert role["rules"][0]["resources"] == ["leaderworkersets"]


def test_keda_sizes_groups_by_what_baton_wants() -> None:
    objects = render({**SCALED, "models": {"two": {}}})
    scaled = of_kind(objects, "ScaledObject")
    assert set(scaled) == {
        f"demo-baton-{name}" for name in ("prefill", "decode", "two-prefill", "two-decode")
    }
    decode = scaled["demo-baton-decode"]
    check(decode)
    spec = decode["spec"]
    target = of_kind(objects, "LeaderWorkerSet")[spec["scaleTargetRef"]["name"]]
    assert "replicas" not in target["spec"], "helm upgrade leaves KEDA's size alone"
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 8)
    assert (spec["pollingInterval"], spec["cooldownPeriod"]) == (15, 60)
    [trigger] = spec["triggers"]
    assert trigger["metadata"] == {
        "serverAddress": "http://prometheus:9090",
        "query": 'max(baton_pool_wanted_instances{namespace="llm",baton_model="baton",pool="decode"})',
        "threshold": "2",
    }
    assert trigger["authenticationRef"] == {"name": "token"}
    query = scaled["demo-baton-two-decode"]["spec"]["triggers"][0]["metadata"]["query"]
    assert 'baton_model="two"' in query


def test_the_metric_that_keda_follows_is_one_that_ingresses_have() -> None:
    """With the labels that the chart's PodMonitor adds."""
    status = Status(
        nonce=1, why_not="", num_queued=0, instances=(), pools=(PoolStatus(pool="decode", wanted=3),)
    )
    [wanted, *_] = pool_metrics(status)
    objects = example("leader-worker-set")
    [trigger] = of_kind(objects, "ScaledObject")["demo-baton-decode"]["spec"]["triggers"]
    name, _, labels = trigger["metadata"]["query"].removeprefix("max(").partition("{")
    assert (name, wanted.samples[0].labels) == (wanted.name, {"pool": "decode"})
    assert 'pool="decode"' in labels
    assert "baton/model" in of_kind(objects, "PodMonitor")["demo-baton"]["spec"]["podTargetLabels"]


def test_of_an_instance_on_two_pods_the_bounds_are_groups() -> None:
    spec = of_kind(example("leader-worker-set"), "ScaledObject")["demo-baton-decode"]["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 4)
    assert spec["triggers"][0]["metadata"]["threshold"] == "1"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({**PLAIN, "autoscaling": {"enabled": True}}, "needs KubeRay"),
        ({**PLAIN, "controller": {"scale": True}}, "sizes KubeRay's worker groups"),
        ({**SCALED, "kind": "RayService"}, "a RayCluster has no scale that KEDA could set"),
        ({**SCALED, "keda": {"enabled": True}}, "say with keda.prometheus"),
        ({**SCALED, "config": {}}, "stays as it is without config.scaling.enabled"),
    ],
)
def test_what_cannot_scale_together_is_refused(values: Object, why: str) -> None:
    with pytest.raises(HelmError, match=why):
        render(values)
