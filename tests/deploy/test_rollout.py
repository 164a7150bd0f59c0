"""A rollout's step as Serve is told it: one deployment changes, the rest is what the file said."""

from typing import Any

import pytest

from cluster.deploy.rollout import replica_ids, restarted
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
        "import_path": "cluster.deploy.app:build",
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
    assert pool.ray_actor_options.runtime_env == {"env_vars": {"BATON_ROLLOUT": "x1"}}
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
