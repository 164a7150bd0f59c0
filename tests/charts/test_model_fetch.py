"""Weights come to a volume once, by a Job that every pod waits for."""

import sys
import threading
from pathlib import Path

import pytest
import yaml
from helm_python import HelmError

from cluster.deploy.kube import model_files
from core.config.cluster_config import load
from core.errors import ConfigError
from tests.charts.rendering import Object, container, of_kind, pods, render
from tests.charts.schemas import check, check_pod
from tests.charts.test_egress import may_reach, reach

FETCHED: Object = {
    "config": {"model": {"path": "owner/large"}, "engine": {"speculate": "draft:owner/small"}},
    "modelCache": {"enabled": True, "fetch": {"enabled": True, "tolerations": [{"operator": "Exists"}]}},
    "models": {"two": {"config": {"model": {"path": "owner/other"}}}},
    "huggingFace": {"existingSecret": "hf"},
}


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was asked of the hub."""
    asked: list[str] = []

    def resolve(path: str) -> Path:
        asked.append(path)
        return tmp_path / "hub" / path

    monkeypatch.setattr(model_files, "resolve", resolve)
    return asked


def run(command: list[str], tmp_path: Path, objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a container's command of the chart here, with its ConfigMap and its volume."""
    for name, text in of_kind(objects, "ConfigMap")["demo-baton-config"]["data"].items():
        (tmp_path / name).write_text(text)
    here = [
        part.replace("/etc/baton/config", str(tmp_path)).replace("/models", str(tmp_path / "volume"))
        for part in command
    ]
    assert here[:3] == ["python", "-m", "cluster.deploy.kube.model_files"]
    monkeypatch.setattr(sys, "argv", here[2:])
    return model_files.main()


def job_command(objects: list[Object]) -> list[str]:
    [job] = of_kind(objects, "Job").values()
    return job["spec"]["template"]["spec"]["containers"][0]["command"]


def test_the_job_downloads_every_model_once_and_pods_go_on_when_theirs_is_whole(
    downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render(FETCHED)
    wait = pods(objects)["decode"]["spec"]["initContainers"][0]["command"]
    at_once = [part if "timeout" not in part else "--timeout-s=0" for part in wait]
    assert run(at_once, tmp_path, objects, monkeypatch) == 1, "nothing is there yet"
    assert run(job_command(objects), tmp_path, objects, monkeypatch) == 0
    assert downloads == ["owner/large", "owner/small", "owner/other"]
    assert run(wait, tmp_path, objects, monkeypatch) == 0
    assert run(job_command(objects), tmp_path, objects, monkeypatch) == 0
    assert len(downloads) == 3, "what is whole stays as it is"


def test_a_pod_waits_while_a_download_is_not_whole(
    downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "POLL_S", 0.01)
    waiting = threading.Thread(target=model_files.wait, args=(["owner/large"], tmp_path, 60))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    model_files.fetch(["owner/large"], tmp_path)
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_download_that_fails_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> Path:
        raise ConfigError("the hub does not answer")

    monkeypatch.setattr(model_files, "resolve", fails)
    with pytest.raises(ConfigError, match="does not answer"):
        model_files.fetch(["owner/large"], tmp_path)
    with pytest.raises(ConfigError, match="owner/large was not fetched within 0 s"):
        model_files.wait(["owner/large"], tmp_path, 0)


def test_what_is_in_a_folder_is_not_fetched(tmp_path: Path) -> None:
    assert model_files.hub_ids(load(None, {}, {"model.path": str(tmp_path)})) == []
    assert model_files.hub_ids(load(None, {})) == []


def test_the_job_and_the_pods_share_a_volume_and_only_the_job_asks_the_hub() -> None:
    objects = render(
        FETCHED
        | {
            "networkPolicy": {
                "egress": {"enabled": True, "kubernetesApi": [{"ipBlock": {"cidr": "10.96.0.1/32"}}]}
            }
        }
    )
    [job] = of_kind(objects, "Job").values()
    check(job)
    spec = job["spec"]["template"]["spec"]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    claims = {v["name"]: v.get("persistentVolumeClaim", {}).get("claimName") for v in spec["volumes"]}
    assert claims["models"] == "demo-baton-models"
    env = {one["name"]: one for one in spec["containers"][0]["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "token"}
    assert "HF_HUB_OFFLINE" not in env
    assert may_reach(reach(objects, job["spec"]["template"]["metadata"]["labels"]), "18.155.1.1", 443)
    for name, template in pods(objects).items():
        check_pod(template)
        assert not may_reach(reach(objects, template["metadata"]["labels"]), "18.155.1.1", 443)
        first = template["spec"].get("initContainers", [{"name": "none"}])[0]
        assert (first["name"] == "model") is (name != "head")
        assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container(template)["env"]
        [models] = [v for v in template["spec"]["volumes"] if v["name"] == "models"]
        assert models["persistentVolumeClaim"]["claimName"] == "demo-baton-models"


def test_pods_wait_as_long_and_the_job_has_as_much_as_is_said() -> None:
    fetch = {"enabled": True, "timeoutSeconds": 60, "resources": {"limits": {"memory": "9Gi"}}}
    objects = render({**FETCHED, "modelCache": {"enabled": True, "fetch": fetch}})
    [job] = of_kind(objects, "Job").values()
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "9Gi"
    assert "--timeout-s=60" in pods(objects)["decode"]["spec"]["initContainers"][0]["command"]


def test_other_models_are_another_job() -> None:
    other = {**FETCHED, "config": {"model": {"path": "owner/larger"}}}
    same = {**FETCHED, "config": {**FETCHED["config"], "decode_instances": 4}}
    names = [set(of_kind(render(values), "Job")) for values in (FETCHED, same, other)]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"modelCache": {"fetch": {"enabled": True}}}, "needs modelCache.enabled"),
        ({"modelCache": {"enabled": True, "fetch": {"enabled": True}}}, "no model.path is a hub id"),
    ],
)
def test_a_job_that_could_do_nothing_is_refused(values: Object, why: str) -> None:
    with pytest.raises(HelmError, match=why):
        render(values)


def test_the_configuration_that_it_reads_is_yaml_of_the_server() -> None:
    texts = of_kind(render(FETCHED), "ConfigMap")["demo-baton-config"]["data"]
    assert {name: load(yaml.safe_load(text), {}).model.path for name, text in texts.items()} == {
        "baton.yaml": "owner/large",
        "two.yaml": "owner/other",
    }
