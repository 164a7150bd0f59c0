"""A rollout's step as Serve is told it: one deployment changes, the rest is what the file said. And a file that is sent after it."""

from copy import deepcopy
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

from cluster.deploy.rollout import replica_ids, restarted, with_stamps
from core.errors import ConfigError


def details(config: dict[str, Any] | None) -> dict[str, Any]:
    def deployment(options: dict[str, Any]) -> dict[str, Any]:
        return {"deployment_config": {"ray_actor_options": options}, "replicas": [{"replica_id": "r1"}]}

    pools = {
        "DecodePool": deployment({"num_cpus": 2.0, "resources": {"decode": 1.0}}),
        "Ingress": deployment({}),
    }
    app = {"deployed_app_config": config, "deployments": pools}
    return {"proxy_location": "Disabled", "applications": {"baton": app}}


def config() -> dict[str, Any]:
    return {
        "name": "baton",
        "import_path": "cluster.deploy.serve_app:build",
        "args": {"decode_instances": 2},
        "deployments": [{"name": "DecodePool", "num_replicas": 3}],
    }


def test_one_deployment_gets_the_stamp_and_keeps_what_it_has() -> None:
    schema = restarted(details(config()), "baton", "DecodePool", "x1")
    (app,) = schema.applications
    (pool,) = app.deployments
    assert pool.num_replicas == 3
    assert pool.ray_actor_options.num_cpus == 2
    assert pool.ray_actor_options.resources == {"decode": 1}
    marks = {"BATON_ROLLOUT": "x1", "BATON_ROLLOUT_AS_BUILT": "1"}
    assert pool.ray_actor_options.runtime_env == {"env_vars": marks}
    assert app.args == {"decode_instances": 2}


def test_a_deployment_that_the_file_does_not_name_is_added() -> None:
    schema = restarted(details(config()), "baton", "Ingress", "x1")
    assert [found.name for found in schema.applications[0].deployments] == ["DecodePool", "Ingress"]
    assert replica_ids(details(config()), "baton", "Ingress") == {"r1"}


def test_what_was_not_deployed_from_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="baton deploy"):
        restarted(details(None), "baton", "Ingress", "x1")
    with pytest.raises(ConfigError, match="only: baton"):
        restarted(details(config()), "other", "Ingress", "x1")


OWN_OPTIONS = {"num_cpus": 4, "runtime_env": {"env_vars": {"MINE": "1"}}}


def sent(application: dict[str, Any]) -> ServeDeploySchema:
    content = {"proxy_location": "Disabled", "applications": [application]}
    return ServeDeploySchema.model_validate(deepcopy(content))


def told(schema: ServeDeploySchema) -> dict[str, Any]:
    return schema.model_dump(mode="json", exclude_unset=True)


def own(options: dict[str, Any]) -> dict[str, Any]:
    application = config()
    application["deployments"][0]["ray_actor_options"] = options
    return application


def rolled_out(application: dict[str, Any]) -> dict[str, Any]:
    """Details after both deployments have been restarted, twice."""
    now = details(told(sent(application))["applications"][0])
    for stamp in ("x1", "x2"):
        for deployment in ("DecodePool", "Ingress"):
            step = told(restarted(now, "baton", deployment, stamp))["applications"][0]
            now["applications"]["baton"]["deployed_app_config"] = step
    return now


@pytest.mark.parametrize("application", [config(), own(OWN_OPTIONS), own({"runtime_env": {}})])
def test_the_same_file_after_a_rollout_changes_nothing(application: dict[str, Any]) -> None:
    now = rolled_out(application)
    kept = told(with_stamps(sent(application), now))["applications"][0]
    assert kept == now["applications"]["baton"]["deployed_app_config"]
    assert "x2" in str(kept)
    assert "x1" not in str(kept)


def test_another_number_of_replicas_keeps_the_stamps() -> None:
    now, smaller = rolled_out(config()), config()
    smaller["deployments"][0]["num_replicas"] = 1
    pool = told(with_stamps(sent(smaller), now))["applications"][0]["deployments"][0]
    assert pool["num_replicas"] == 1
    assert pool["ray_actor_options"]["runtime_env"]["env_vars"]["BATON_ROLLOUT"] == "x2"


def test_what_a_file_says_of_actors_is_what_they_get() -> None:
    """An actor's options neither come from before, nor are they left out because there were others."""
    now = rolled_out(own(OWN_OPTIONS))
    for wanted in (config(), own({"num_cpus": 8})):
        pool = told(with_stamps(sent(wanted), now))["applications"][0]["deployments"][0]
        assert pool == told(sent(wanted))["applications"][0]["deployments"][0]
    now = rolled_out(config())
    pool = told(with_stamps(sent(own(OWN_OPTIONS)), now))["applications"][0]["deployments"][0]
    assert pool == told(sent(own(OWN_OPTIONS)))["applications"][0]["deployments"][0]


@pytest.mark.parametrize(
    "change", [{"args": {}}, {"runtime_env": {"pip": []}}, {"import_path": "other:build"}]
)
def test_where_all_is_replaced_in_any_case_the_file_is_sent_as_it_is(change: dict[str, Any]) -> None:
    """With the options that the new arguments lead to, not those of the old ones."""
    changed = sent(config() | change)
    assert with_stamps(changed, rolled_out(config())) == changed


def test_a_file_for_what_does_not_run_is_sent_as_it_is() -> None:
    assert with_stamps(sent(config()), {"applications": {}}) == sent(config())
    assert with_stamps(sent(config()), details(None)) == sent(config())
