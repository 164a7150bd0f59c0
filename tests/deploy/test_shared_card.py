"""A prefill and a decode instance on one card: what they ask of Ray, and where they refuse to start."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.deploy.launch import Cluster
from cluster.deploy.rank_bundles import no_room, pools_on
from cluster.deploy.serve_app import build_application
from cluster.deploy.serve_file import check_serve_file
from cluster.deploy.shared_card import take_share
from cluster.preflight.card_check import check_card
from cluster.preflight.findings import Verdict
from core.config.cluster_config import ClusterConfig, load
from core.errors import ConfigError
from device.mps import PIPE_DIRECTORY, THREAD_PERCENTAGE

SHARES: dict[str, Any] = {"engine.device": "cuda", "prefill.gpu_share": 0.4, "decode.gpu_share": 0.6}
ONE_GPU = {"CPU": 8.0, "GPU": 1.0}


def shared(**keys: Any) -> ClusterConfig:
    return load(None, {}, {**SHARES, **keys})


def test_each_asks_ray_for_its_part_of_a_gpu() -> None:
    bound = build_application(shared(), b"key", one_host=True)._bound_deployment.init_args[3]
    asked = {
        pool._bound_deployment.name: pool._bound_deployment._replica_config.ray_actor_options["num_gpus"]
        for pool in bound
    }
    assert asked == {"PrefillPool": 0.4, "DecodePool": 0.6}


def test_they_have_room_on_nodes_of_one_gpu_alone() -> None:
    config = shared()
    assert no_room(config, [ONE_GPU]) == ""
    assert pools_on(config, ONE_GPU) == ("prefill", "decode")
    eight = {"CPU": 64.0, "GPU": 8.0}
    assert pools_on(config, eight) == ()
    assert no_room(config, [eight]) == (
        "prefill: an instance of 1 ranks must be on one host, and no node of one GPU has 0.25 CPU, 0.4 GPU"
    )


def test_on_a_node_of_several_gpus_an_instance_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"this Ray node has 8 GPUs.*--num-gpus 1"):
        take_share(shared(), "decode", {}, lambda: {"GPU": 8.0})


def test_without_mps_an_instance_starts_only_where_all_processors_are_its_own(tmp_path: Path) -> None:
    env = {PIPE_DIRECTORY: str(tmp_path)}
    with pytest.raises(ConfigError, match=r"prefill\.sm_share bounds it to 40%"):
        take_share(shared(), "prefill", env, lambda: ONE_GPU)
    take_share(shared(**{"prefill.sm_share": 1}), "prefill", env, lambda: ONE_GPU)
    take_share(load(None, {}), "prefill", env, lambda: {"GPU": 8.0})
    assert THREAD_PERCENTAGE not in env


def test_one_host_alone_has_a_card_for_one_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(ConfigError, match="there are 1 prefill and 2 decode instances"):
        Cluster.start(shared(decode_instances=2))


@pytest.mark.parametrize("options", [{"num_gpus": 1}, {"num_cpus": 1}])
def test_a_serve_file_asks_for_as_much_of_a_card_as_the_configuration_says(options: dict[str, Any]) -> None:
    def content(options: dict[str, Any]) -> dict[str, Any]:
        application = {
            "name": "baton",
            "import_path": "cluster.deploy.serve_app:build",
            "route_prefix": None,
            "args": {
                "engine": {"device": "cuda"},
                "prefill": {"gpu_share": 0.4},
                "decode": {"gpu_share": 0.6},
            },
            "deployments": [{"name": "DecodePool", "ray_actor_options": options}],
        }
        return {"proxy_location": "Disabled", "applications": [application]}

    check_serve_file(content({"num_gpus": 0.6}))
    with pytest.raises(
        ConfigError, match=r"num_gpus in ray_actor_options is \d, and an instance's gpu_share 0\.6"
    ):
        check_serve_file(content(options))


@pytest.mark.parametrize(
    ("keys", "verdict", "expected"),
    [
        ({}, Verdict.FAIL, "prefill to 40% and decode to 60%"),
        ({"decode.sm_share": 1}, Verdict.FAIL, "prefill to 40% of"),
        ({"prefill.sm_share": 1, "decode.sm_share": 1}, Verdict.WARN, "not in turns"),
    ],
)
def test_doctor_asks_for_the_daemon_that_bounds_them(
    keys: dict[str, Any], verdict: Verdict, expected: str, tmp_path: Path
) -> None:
    (found,) = check_card("n", shared(**keys), {PIPE_DIRECTORY: str(tmp_path)})
    assert (found.check, found.verdict) == ("MPS", verdict)
    assert "no MPS daemon listens" in found.measured
    assert expected in found.expected
    assert list(check_card("n", load(None, {}), {})) == []
