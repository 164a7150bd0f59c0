"""Models that share memory are refused where nobody would wake them, and on Ray where they cannot share processes."""

from typing import Any

import pytest

from cluster.deploy.serve_app import build_application
from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.errors import ConfigError

RESIDENCY = {"residency": {"mode": "on_demand", "group": "card"}}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            {"models": {"a": "embedded", "b": {"path": "embedded", "prefill_instances": 0}}},
            "models.b: prefill_instances is 0, and 1 in models.a. On Ray",
        ),
        (
            {"models": {"a": "embedded", "b": {"path": "embedded", "decode": {"tp": 2}}}},
            r"models.b: decode is {'tp': 2}, and {} in models.a",
        ),
        (
            {
                "residency_groups": {"a": {"awake_models": 1}},
                "schedule": {"residency": {"mode": "on_demand", "group": "a"}},
            },
            "residency_groups.a and a model have one name",
        ),
        (
            {
                "models": dict.fromkeys("abc", "embedded"),
                "residency_groups": {"card": {"awake_models": 2}},
                "decode": {"tp": 2},
            },
            r"awake_models must be 1 on Ray where an instance has several ranks \(decode has 2\)",
        ),
        (
            {"engine": {"device": "cuda"}, "prefill": {"gpu_share": 0.4}, "decode": {"gpu_share": 0.6}},
            "gpu_share must be 1 in a group",
        ),
    ],
)
def test_models_that_share_processes_are_alike(more: dict[str, Any], why: str) -> None:
    models = {"a": "embedded", "b": "embedded"}
    groups = {"card": {"awake_models": 1}}
    values: dict[str, Any] = {"models": models, "residency_groups": groups, "schedule": RESIDENCY} | more
    with pytest.raises(ConfigError, match=why):
        build_application(load(values, {}), b"", one_host=True)


async def test_a_model_alone_is_in_no_group() -> None:
    with pytest.raises(ConfigError, match="would never wake up"):
        async with LocalCluster.running(load({"schedule": RESIDENCY}, {})):
            pass
