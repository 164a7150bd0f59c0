"""Requests and limits follow Baton's memory model: `baton pods` prints them, and each pod compares its own before it joins."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Context
from typer.main import get_command
from typer.testing import CliRunner

from baton.cli.main import app
from baton.cli.pods import resources_of
from cluster.deploy.kube.worker_groups import offered_resources
from cluster.deploy.pool_instance import INSTANCES
from core.config.cluster_config import ClusterConfig, load
from core.errors import ConfigError
from tests.charts.rendering import (
    EXAMPLES,
    Object,
    cluster_spec,
    container,
    example,
    of_kind,
    pods,
    render,
    serve_config,
)
from tests.models.real_configs import write_config

UNITS = {"Gi": 2**30, "Ti": 2**40}


def num_bytes(quantity: Any) -> int:
    text = str(quantity)
    return int(text[:-2]) * UNITS[text[-2:]] if text[-2:] in UNITS else int(text)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Models' configurations are at hand, as the hub has them."""

    def describe(path: str) -> Path:
        if path == "embedded":
            return Path("models/embedded").resolve()
        return write_config(tmp_path / path.strip("/"), path)

    monkeypatch.setattr("cluster.preflight.pod_memory.describe", describe)


def commands(objects: list[Object]) -> list[list[str]]:
    made = [one for template in pods(objects).values() for one in template["spec"].get("initContainers", [])]
    jobs = [job["spec"]["template"]["spec"]["containers"] for job in of_kind(objects, "Job").values()]
    found = [one["command"] for one in (*made, *(one for job in jobs for one in job)) if "command" in one]
    return [command for command in found if command[:2] == ["baton", "doctor"]]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_doctor_takes_the_options_that_it_is_given(name: str) -> None:
    doctor = get_command(app).commands["doctor"]  # type: ignore[attr-defined]
    given = commands(example(name))
    assert given
    for command in given:
        doctor.make_context("doctor", [part.replace("$(JOB_COMPLETION_INDEX)", "0") for part in command[2:]])


def test_each_pod_knows_its_configuration_and_how_many_instances_it_has() -> None:
    objects = render(
        {"decode": {"instancesPerPod": 3}, "models": {"two": {"config": {"decode_instances": 1}}}}
    )
    made = of_kind(objects, "ConfigMap")["demo-baton-config"]["data"]
    for application in serve_config(objects)["applications"]:
        told = load(yaml.safe_load(made[f"{application['name']}.yaml"]), {})
        assert told == ClusterConfig.model_validate(application["args"])
    for group, asked in {
        "decode": "--config /etc/baton/config/baton.yaml --instances 3 --pool decode",
        "two-prefill": "--config /etc/baton/config/two.yaml --instances 1 --pool prefill",
    }.items():
        first = pods(objects)[group]["spec"]["initContainers"][0]
        assert shlex.join(first["command"][2:]) == asked
        mounts = {one["name"]: one["mountPath"] for one in first["volumeMounts"]}
        assert mounts["config"] == "/etc/baton/config"
    shared = pods(example("shared-card"))["decode"]["spec"]["initContainers"][0]
    assert shared["command"][-4:] == ["--pool", "decode", "--pool", "prefill"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_instances_share_a_pods_memory_with_those_of_the_same_pod_alone(name: str) -> None:
    objects = example(name)
    for group in cluster_spec(objects)["workerGroupSpecs"]:
        env = {one["name"]: one.get("value") for one in container(group["template"])["env"]}
        offered = sum(offered_resources(group).values())
        if group["groupName"].endswith("ingress"):
            assert INSTANCES not in env
        else:
            assert 1 <= int(env[INSTANCES]) <= offered


def test_a_change_of_the_configuration_changes_no_pod() -> None:
    before, after = render(), render({"config": {"engine": {"max_num_seqs": 7}}})
    assert pods(before) == pods(after)


@pytest.mark.usefixtures("described")
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "ray-cluster"])
def test_what_an_example_gives_its_pods_is_at_least_what_baton_pods_prints(name: str) -> None:
    objects = example(name)
    printed = resources_of(yaml.safe_load(EXAMPLES[name].read_text()))
    groups = {group["groupName"]: group for group in cluster_spec(objects)["workerGroupSpecs"]}
    asked = {**printed, **_named(printed.get("models", {})), **_named(printed.get("modelPods", {}))}
    for table in ("models", "modelPods"):
        asked.pop(table, None)
    assert set(asked) == {group for group in groups if not group.endswith("ingress")}
    for group, values in asked.items():
        given = container(groups[group]["template"])["resources"].get("limits", {})
        if "memory" in given:
            least = num_bytes(values["resources"]["limits"]["memory"])
            assert num_bytes(given["memory"]) >= least, group


def _named(models: Object) -> Object:
    return {
        f"{re.sub('[^a-z0-9]+', '-', model.lower())}-{pool}": found
        for model, pools in models.items()
        for pool, found in pools.items()
    }


@pytest.mark.usefixtures("described")
def test_what_is_printed_is_values_of_the_chart() -> None:
    values = {
        "config": {"engine": {"kv_bytes": 8 << 30}, "decode_instances": 4},
        "decode": {"instancesPerPod": 2},
    }
    printed = resources_of(values)
    limits = {name: printed[name]["resources"]["limits"]["memory"] for name in ("prefill", "decode")}
    assert num_bytes(limits["prefill"]) >= (8 << 30) + (1 << 30)
    assert num_bytes(limits["decode"]) - num_bytes(limits["prefill"]) >= 8 << 30, "one pool more"
    made = pods(render({**values, "decode": {**values["decode"], **printed["decode"]}}))
    assert container(made["decode"])["resources"]["limits"]["memory"] == limits["decode"]


@pytest.mark.usefixtures("described")
def test_of_a_table_each_rows_pods_are_printed_and_a_groups_under_its_name() -> None:
    seldom = {"path": "embedded", "schedule": {"residency": {"mode": "on_demand", "group": "card"}}}
    models = {"code": {"path": "embedded", "engine": {"kv_bytes": 8 << 30}}, "a": seldom, "b": seldom}
    values: Object = {
        "config": {"models": models, "residency_groups": {"card": {"awake_models": 1}}},
        "modelPods": {"code": {"decode": {"instancesPerPod": 2}}},
    }
    printed = resources_of(values)
    assert set(printed) == {"modelPods"}
    limits = {
        f"{name}-{role}": found["resources"]["limits"]["memory"]
        for name, pools in printed["modelPods"].items()
        for role, found in pools.items()
    }
    assert set(limits) == {f"{name}-{role}" for name in ("code", "card") for role in ("prefill", "decode")}
    assert num_bytes(limits["code-decode"]) - num_bytes(limits["code-prefill"]) >= 8 << 30
    made = pods(render({**values, **printed}))
    for group, limit in limits.items():
        assert container(made[group])["resources"]["limits"]["memory"] == limit
    first = made["card-decode"]["spec"]["initContainers"][0]["command"]
    assert shlex.join(first[2:]) == (
        "--config /etc/baton/config/baton.yaml --model=card --instances 1 --pool decode"
    )


def test_a_doctor_that_counts_instances_of_several_models_asks_which(tmp_path: Path) -> None:
    (file := tmp_path / "models.yaml").write_text("models: {a: embedded, b: embedded}")
    options = ["--config", str(file), "--instances", "1", "--pool", "decode"]
    with pytest.raises(ConfigError, match="models has a, b: choose with --model"):
        CliRunner().invoke(app, ["doctor", *options], catch_exceptions=False)


@pytest.mark.parametrize(
    "options",
    [
        ["--instances", "2"],
        ["--pool", "decode"],
        ["--config", "charts/examples/minimal.yaml", "--pool", "decode", "--ray-address", "auto"],
    ],
)
def test_a_doctor_that_could_not_tell_what_a_pod_needs_says_so(options: list[str]) -> None:
    said = CliRunner().invoke(app, ["doctor", *options])
    assert said.exit_code == 2
    assert "of this node alone, and needs --config" in " ".join(said.output.split())


def test_a_pool_that_there_is_not_is_refused() -> None:
    said = CliRunner().invoke(
        app, ["doctor", "--config", "charts/examples/minimal.yaml", "--pool", "both", "--instances", "1"]
    )
    assert "use prefill or decode" in " ".join(said.output.split())


def test_baton_pods_prints_values() -> None:
    said = CliRunner().invoke(app, ["pods", "charts/examples/minimal.yaml"])
    assert said.exit_code == 0, said.output
    assert yaml.safe_load(said.output)["decode"]["resources"]["limits"]["memory"].endswith("Gi")


def test_baton_pods_is_a_command() -> None:
    command = get_command(app).commands["pods"]  # type: ignore[attr-defined]
    assert "resources" in command.get_short_help_str(200) or "memory" in command.get_short_help_str(200)
    assert [param.name for param in command.get_params(Context(command)) if param.name != "help"] == [
        "values"
    ]
