"""What each pod is given: disk to write on, bounded logs, a place, a probe; and what is in front of it lets through."""

from pathlib import Path
from typing import Any

import pytest
from helm_python import HelmError

from cluster.deploy.kube import controller as controller_module
from cluster.ingress.batches.batch_routes import MAX_UPLOAD_BYTES
from core.config.cluster_config import ClusterConfig
from tests.charts.rendering import (
    EXAMPLES,
    Object,
    all_pods,
    container,
    example,
    of_kind,
    pods,
    render,
    serve_config,
)
from tests.charts.schemas import check, check_pod

PLACES: Object = {
    "nodeSelector": {"pool": "small"},
    "tolerations": [{"key": "small", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "serving",
    "topologySpread": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_root_is_read_only_and_temporary_files_and_caches_have_a_place(name: str) -> None:
    for template in all_pods(example(name)):
        volumes = {one["name"]: one for one in template["spec"].get("volumes", [])}
        for one in template["spec"]["containers"]:
            if "baton" not in one["image"]:
                continue
            assert one["securityContext"]["readOnlyRootFilesystem"] is True
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in one["volumeMounts"]}
            assert "sizeLimit" in mounts["/tmp"]["emptyDir"]


def test_scratch_is_requested_and_bounded_where_nothing_else_is_on_the_disk() -> None:
    own, shared = ({"scratchSize": "30Gi"}, {"modelCache": {"enabled": True}})
    alone = container(pods(render({"decode": own}))["decode"])["resources"]
    assert alone["requests"]["ephemeral-storage"] == "30Gi"
    assert "ephemeral-storage" not in alone.get("limits", {}), "it downloads the model, of whatever size"
    for name, template in pods(render({"decode": own, **shared})).items():
        resources = container(template)["resources"]
        assert resources["requests"]["ephemeral-storage"] == ("30Gi" if name == "decode" else "20Gi")
        assert resources["limits"]["ephemeral-storage"] == resources["requests"]["ephemeral-storage"]
    given = {"resources": {"limits": {"ephemeral-storage": "90Gi"}}}
    said = container(pods(render({"decode": given, **shared}))["decode"])["resources"]
    assert said["limits"]["ephemeral-storage"] == "90Gi"


def test_logs_are_rotated_in_every_pod_of_ray() -> None:
    for template in pods(render()).values():
        env = {one["name"]: one.get("value") for one in container(template)["env"]}
        assert (env["RAY_ROTATION_MAX_BYTES"], env["RAY_ROTATION_BACKUP_COUNT"]) == (str(64 << 20), "1")
    said = render({"decode": {"env": [{"name": "RAY_ROTATION_MAX_BYTES", "value": "1048576"}]}})
    names = [one for one in container(pods(said)["decode"])["env"] if one["name"] == "RAY_ROTATION_MAX_BYTES"]
    assert names[-1]["value"] == "1048576", "the last one holds"


def test_head_and_ingress_pods_have_requests_and_limits_unless_told_otherwise() -> None:
    made = pods(render())
    for name in ("head", "ingress"):
        resources = container(made[name])["resources"]
        assert {"cpu", "memory", "ephemeral-storage"} <= set(resources["requests"])
        assert "memory" in resources["limits"]
    said = container(pods(render({"ingress": {"resources": {"limits": {"memory": "16Gi"}}}}))["ingress"])
    assert (said["resources"]["limits"]["memory"], said["resources"]["requests"]["cpu"]) == ("16Gi", "2")


def test_all_ingresses_share_uploaded_files_and_each_model_has_its_own() -> None:
    objects = render({"files": {"enabled": True, "size": "7Gi"}, "models": {"two": {}}})
    claim = of_kind(objects, "PersistentVolumeClaim")["demo-baton-files"]
    check(claim)
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi"
    made = pods(objects)
    for name in ("ingress", "two-ingress"):
        check_pod(made[name])
        assert {"name": "files", "mountPath": "/files"} in container(made[name])["volumeMounts"]
    assert "files" not in {one["name"] for one in made["decode"]["spec"]["volumes"]}
    configs = [ClusterConfig.model_validate(one["args"]) for one in serve_config(objects)["applications"]]
    assert [config.serve.batch_dir for config in configs] == ["/files/baton", "/files/two"]
    given = render({"files": {"enabled": True, "existingClaim": "mine"}})
    assert not of_kind(given, "PersistentVolumeClaim")
    with pytest.raises(HelmError, match="give one of both"):
        render({"files": {"enabled": True}, "config": {"serve": {"batch_dir": "/mine"}}})


def test_all_ingresses_share_the_store_that_a_secret_names() -> None:
    objects = render({"store": {"existingSecret": "mine"}, "models": {"two": {}}})
    made = pods(objects)
    for name in ("ingress", "two-ingress"):
        check_pod(made[name])
        mount = {"name": "store", "mountPath": "/etc/baton/store", "readOnly": True}
        assert mount in container(made[name])["volumeMounts"]
        [volume] = [one for one in made[name]["spec"]["volumes"] if one["name"] == "store"]
        assert volume["secret"] == {"secretName": "mine", "items": [{"key": "url", "path": "url"}]}
    assert "store" not in {one["name"] for one in made["decode"]["spec"]["volumes"]}
    configs = [ClusterConfig.model_validate(one["args"]) for one in serve_config(objects)["applications"]]
    assert {config.serve.store_file for config in configs} == {"/etc/baton/store/url"}
    peer = {"ipBlock": {"cidr": "10.1.0.0/16"}}
    egress = {"networkPolicy": {"egress": {"enabled": True, "store": [peer]}}}
    policy = of_kind(render({"store": {"existingSecret": "mine"}} | egress), "NetworkPolicy")[
        "demo-baton-egress-store"
    ]
    assert policy["spec"]["egress"] == [{"ports": [{"port": 5432, "protocol": "TCP"}], "to": [peer]}]
    for given in ({"store": "postgresql://host/x"}, {"store_file": "/mine"}):
        with pytest.raises(HelmError, match=r"leave config\.serve\.store and store_file out"):
            render({"store": {"existingSecret": "mine"}, "config": {"serve": given}})


def let_through(values: Object) -> int:
    objects = render({**values, "expose": {"ingress": {"enabled": True}}})
    notes = of_kind(objects, "Ingress")["demo-baton"]["metadata"]["annotations"]
    return int(notes["nginx.ingress.kubernetes.io/proxy-body-size"])


def test_the_largest_upload_and_the_largest_body_pass_what_is_in_front() -> None:
    assert let_through({}) == 8 << 20
    assert let_through({"files": {"enabled": True}}) == MAX_UPLOAD_BYTES
    for serve in ({"batch_dir": "/mine"}, {"store": "postgresql://host/x"}, {"store_file": "/mine"}):
        assert let_through({"config": {"serve": serve}}) == MAX_UPLOAD_BYTES
    assert let_through({"store": {"existingSecret": "mine"}}) == MAX_UPLOAD_BYTES
    large = {"config": {"serve": {"max_body_bytes": 1 << 30}}, "files": {"enabled": True}}
    assert let_through(large) == 1 << 30


def test_the_controller_and_the_deploying_job_run_where_they_are_told_to() -> None:
    objects = render({"kind": "RayCluster", "controller": PLACES})
    made = [*of_kind(objects, "Deployment").values(), *of_kind(objects, "Job").values()]
    assert len(made) == 2
    for one in made:
        check(one)
        spec = one["spec"]["template"]["spec"]
        for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
            assert spec[key] == PLACES[key]
        [spread] = spec["topologySpreadConstraints"]
        assert spread["topologyKey"] == "topology.kubernetes.io/zone"
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert spread["labelSelector"]["matchLabels"] == labels


@pytest.mark.parametrize(
    "changed",
    [
        {"controller": {"tolerations": [{"operator": "Exists"}]}},
        {"image": {"pullSecrets": ["mine"]}},
        {"modelCache": {"existingClaim": "mine"}},
        {"huggingFace": {"existingSecret": "mine"}},
        {"models": {"two": {}}},
        {"rayAuth": {"existingSecret": "mine"}},
    ],
)
def test_a_job_whose_pod_changes_has_another_name(changed: Object) -> None:
    """Kubernetes lets nobody change one that is there."""
    values: Object = {
        "kind": "RayCluster",
        "config": {"model": {"path": "owner/name"}},
        "modelCache": {"enabled": True, "fetch": {"enabled": True}},
    }
    merged = {**values, **changed, "modelCache": {**values["modelCache"], **changed.get("modelCache", {})}}
    before, after = (of_kind(render(each), "Job") for each in (values, merged))
    assert len(before) == len(after) == 2
    for name in set(before) & set(after):
        assert before[name]["spec"] == after[name]["spec"]
    assert set(before) != set(after)


class _EnoughError(Exception):
    pass


def test_the_controllers_probes_ask_when_it_has_last_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [deployment] = of_kind(render({"models": {"two": {}}}), "Deployment").values()
    [controller] = deployment["spec"]["template"]["spec"]["containers"]
    [looked] = [part for part in controller["command"] if part.startswith("--looked=")]
    asked = controller["livenessProbe"]["exec"]["command"][-1]
    assert looked.removeprefix("--looked=") in asked
    assert "-135 seconds" in asked, "two models that do not answer are no reason to start again"
    assert controller["startupProbe"]["exec"]["command"][-1] == looked.removeprefix("--looked=")
    file = tmp_path / "looked"
    command = [part.replace("/tmp/looked", str(file)) for part in controller["command"][3:]]
    command = [part for part in command if not part.startswith("--endpoint")]

    def wait(_: Any) -> None:
        raise _EnoughError

    monkeypatch.setattr("sys.argv", ["controller", *command])
    monkeypatch.setattr(controller_module.config, "load_incluster_config", lambda: None)
    monkeypatch.setattr(controller_module.time, "sleep", wait)
    with pytest.raises(_EnoughError):
        controller_module.main()
    assert file.exists()
