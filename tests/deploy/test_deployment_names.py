"""Each model of a table has deployments of its own, and what looks at deployments finds them by the model's name."""

from typing import Any

import pytest

from cluster.deploy.deployment_names import deployments_of
from cluster.deploy.deployment_phases import phase_of
from cluster.deploy.rollout import rollout
from cluster.deploy.serve_app import build_application
from cluster.deploy.serve_file import check_serve_file
from core.config.cluster_config import load
from core.errors import ConfigError

ARGS: dict[str, Any] = {
    "models": {
        "small": "embedded",
        "org/big": {
            "path": "org/big",
            "engine": {"device": "cuda"},
            "decode": {"tp": 2},
            "prefill_instances": 0,
            "decode_instances": 3,
        },
    },
    "serve": {"schedulers": 2},
}


def bound(application: Any) -> Any:
    return application._bound_deployment


def test_one_ingress_and_a_fleet_for_each_model() -> None:
    ingress = bound(build_application(load(ARGS, {}), b"key", one_host=True))
    config, _, schedulers, pools = ingress.init_args
    assert (ingress.name, len(config.models)) == ("Ingress", 2)
    assert [bound(one).name for one in schedulers] == ["Scheduler-small", "Scheduler-org-big"]
    found = {bound(pool).name: bound(pool) for pool in pools}
    assert list(found) == ["DecodePool-small", "PrefillPool-small", "DecodePool-org-big"]
    big = found["DecodePool-org-big"]
    assert (big.num_replicas, [row.model.name for row in big.init_args[0]]) == (3, ["org/big"])
    assert big._replica_config.placement_group_bundles == [{"CPU": 0.5, "GPU": 2.0}]
    assert [bound(one).name for one in big.init_args[2]] == ["Scheduler-org-big"]
    assert found["DecodePool-small"]._replica_config.ray_actor_options["num_gpus"] == 0


def test_the_models_of_a_group_share_pools_and_have_one_scheduler_each() -> None:
    values: dict[str, Any] = {
        "models": {name: {"path": "embedded"} for name in ("a", "b", "alone")},
        "residency_groups": {"card": {"awake_models": 1}},
    }
    for name in ("a", "b"):
        values["models"][name]["schedule"] = {"residency": {"mode": "on_demand", "group": "card"}}
    config = load(values, {})
    ingress = bound(build_application(config, b"key", one_host=True))
    _, _, schedulers, pools = ingress.init_args
    own = {bound(one).name: bound(one) for one in schedulers}
    assert [(name, one.num_replicas) for name, one in own.items()] == [
        ("Scheduler-a", 1),
        ("Scheduler-b", 1),
        ("Scheduler-alone", 2),
    ]
    assert [bound(one.init_args[2]).name for one in [*own.values()][:2]] == ["Group-card"] * 2
    assert own["Scheduler-alone"].init_args[2] is None
    assert [one.init_kwargs["pools"] for one in own.values()] == ["-card", "-card", "-alone"]
    found = {bound(pool).name: bound(pool) for pool in pools}
    assert list(found) == ["DecodePool-card", "PrefillPool-card", "DecodePool-alone", "PrefillPool-alone"]
    card = found["DecodePool-card"]
    assert [row.model.name for row in card.init_args[0]] == ["a", "b"]
    assert [bound(one).name for one in card.init_args[2]] == ["Scheduler-a", "Scheduler-b"]
    assert {*found, *own, "Group-card", "Ingress"} == {*deployments_of(config)}


def test_one_model_keeps_its_names() -> None:
    assert deployments_of(load({}, {})) == ["Ingress", "Scheduler", "PrefillPool", "DecodePool"]
    assert [phase_of(name) for name in deployments_of(load({}, {}))] == [
        "ingress",
        "scheduler",
        "pools",
        "pools",
    ]


def test_a_start_says_which_models_pools_run() -> None:
    said = [phase_of(name) for name in deployments_of(load(ARGS, {}))]
    assert said[:4] == ["ingress", "scheduler of small", "pools of small", "pools of small"]
    assert said[-1] == "pools of org-big"


def serve_file(*deployments: dict[str, Any]) -> dict[str, Any]:
    app = {"name": "baton", "import_path": "cluster.deploy.serve_app:build", "args": ARGS}
    return {"proxy_location": "Disabled", "applications": [{**app, "deployments": [*deployments]}]}


def test_a_serve_file_says_what_ray_shall_know_about_one_model() -> None:
    schema, _ = check_serve_file(serve_file({"name": "DecodePool-small", "num_replicas": 4}))
    assert schema.applications[0].deployments[0].num_replicas == 4
    for wrong, why in (
        ({"name": "DecodePool"}, "no deployment 'DecodePool', only Ingress, Scheduler-small"),
        ({"name": "DecodePool-org-big", "ray_actor_options": {"num_cpus": 1}}, "its 2 ranks ask"),
        ({"name": "Scheduler-small", "num_replicas": 1}, "num_replicas of Scheduler-small is 1"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_serve_file(serve_file(wrong))


class Rest:
    """Serve, which replaces the replicas of a deployment whose stamp is new at once."""

    def __init__(self) -> None:
        self.deployments: dict[str, Any] = {
            name: {"deployment_config": {}, "replicas": [{"replica_id": name}]}
            for name in deployments_of(load(ARGS, {}))
        }
        self.config = {**serve_file()["applications"][0]}
        self.replaced: list[str] = []

    def details(self) -> dict[str, Any]:
        app = {"deployed_app_config": self.config, "deployments": self.deployments}
        return {"proxy_location": "Disabled", "applications": {"baton": app}}

    def deploy(self, schema: Any) -> None:
        self.config = schema.model_dump(mode="json", exclude_unset=True)["applications"][0]
        name = self.config["deployments"][-1]["name"]
        self.replaced.append(name)
        self.deployments[name]["replicas"] = [{"replica_id": f"new {name}"}]

    def wait(self, apps: Any, timeout_s: float, say: Any, done: Any) -> None:
        assert done(self.details())


@pytest.mark.parametrize(
    ("wanted", "replaced"),
    [
        (("PrefillPool", "DecodePool"), ["PrefillPool-small", "PrefillPool-org-big", "DecodePool-small", "DecodePool-org-big"]),
        (("DecodePool-org-big", "Ingress"), ["DecodePool-org-big", "Ingress"]),
    ],
)  # fmt: skip
def test_a_roll_out_takes_all_models_or_one(wanted: tuple[str, ...], replaced: list[str]) -> None:
    rest: Any = Rest()
    rollout(rest, "baton", wanted, "x1", 1.0, lambda _: None)
    assert rest.replaced == replaced
