"""Models that share memory are refused where nobody would wake them."""

import pytest

from cluster.deploy.serve_app import build_application
from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.errors import ConfigError

RESIDENCY = {"residency": {"mode": "on_demand", "group": "card"}}


def test_on_ray_each_model_has_devices_of_its_own() -> None:
    models = {"a": "embedded", "b": "embedded"}
    groups = {"card": {"awake_models": 1}}
    config = load({"models": models, "residency_groups": groups, "schedule": RESIDENCY}, {})
    with pytest.raises(ConfigError, match="residency_groups needs `baton serve --local`"):
        build_application(config, b"", one_host=True)


async def test_a_model_alone_is_in_no_group() -> None:
    with pytest.raises(ConfigError, match="would never wake up"):
        async with LocalCluster.running(load({"schedule": RESIDENCY}, {})):
            pass
