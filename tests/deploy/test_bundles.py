"""What instances of several ranks ask of Ray, in Baton's own application and in a Serve file."""

from typing import Any

import pytest
import torch

from cluster.deploy.launch import Cluster
from cluster.deploy.rank_bundles import BundleShare, bundles_of, most_kv_bytes, no_room, shares
from cluster.deploy.serve_app import build_application
from cluster.deploy.serve_file import check_serve_file
from core.config.cluster_config import ClusterConfig, load
from core.errors import ConfigError


def test_a_tensor_parallel_group_is_in_one_bundle() -> None:
    config = load(
        None, {}, {"decode.tp": 4, "decode.pp": 2, "cpus_per_instance": 0.25, "engine.device": "cuda"}
    )
    bundles = bundles_of(config, config.decode)
    assert bundles == [{"CPU": 1.0, "GPU": 4.0}] * 2
    assert shares(bundles, 8) == [BundleShare(rank // 4, 0.25, 1) for rank in range(8)]


@pytest.mark.parametrize("cpus", [0.1, 1 / 3, 2.0])
def test_ranks_never_ask_for_more_than_their_bundle_has(cpus: float) -> None:
    config = load(None, {}, {"prefill.tp": 3, "cpus_per_instance": cpus})
    (bundle,) = bundles_of(config, config.prefill)
    asked = shares([bundle], 3)
    assert sum(share.num_cpus for share in asked) <= bundle["CPU"] + 1e-9
    assert [share.num_gpus for share in asked] == [0, 0, 0]


@pytest.mark.parametrize(
    "bundles",
    [[], [{"CPU": 1}] * 3, [{"GPU": 1}, {"GPU": 1}], [{"GPU": 2}, {"GPU": 0}], [{"GPU": 4}, {"GPU": 4}]],
)
def test_bundles_that_cannot_be_shared_evenly_are_refused(bundles: list[dict[str, float]]) -> None:
    with pytest.raises(ConfigError, match="placement_group_bundles"):
        shares(bundles, 4)


def pools_of(config: ClusterConfig) -> dict[str, Any]:
    """Serve's description of each pool of the application."""
    bound = build_application(config, b"key", one_host=True)._bound_deployment.init_args[3]
    return {pool._bound_deployment.name: pool._bound_deployment._replica_config for pool in bound}


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("auto", 0), ("cuda", 1)])
def test_every_rank_asks_for_its_own_gpu(device: str, gpus: int) -> None:
    pools = pools_of(load(None, {}, {"engine.device": device, "decode.tp": 2, "decode.ep": 2}))
    alone, several = pools["PrefillPool"], pools["DecodePool"]
    assert alone.placement_group_bundles is None
    assert (alone.ray_actor_options["num_cpus"], alone.ray_actor_options["num_gpus"]) == (0.25, gpus)
    assert (several.ray_actor_options["num_cpus"], several.ray_actor_options["num_gpus"]) == (0, 0)
    assert several.placement_group_strategy == "STRICT_PACK"
    assert shares(several.placement_group_bundles, 4) == [
        BundleShare(rank // 2, 0.25, gpus) for rank in range(4)
    ]


def test_ranks_without_a_gpu_each_are_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = load(None, {}, {"engine.device": "cuda", "decode.tp": 2})
    with pytest.raises(ConfigError, match="3 ranks need a GPU each, and this host has 2"):
        Cluster.start(config)


def test_an_instance_that_no_host_could_hold_is_named() -> None:
    keys = {"decode.tp": 4, "decode.pp": 2, "engine.device": "cuda", "prefill_instances": 0}
    config = load(None, {}, keys)
    host = {"CPU": 64.0, "GPU": 8.0}
    assert no_room(config, [{"CPU": 1.0}, host]) == ""
    assert no_room(config, [{"CPU": 64.0, "GPU": 4.0}] * 2) == (
        "decode: an instance of 8 ranks must be on one host, and no node has 2 CPU, 8 GPU"
    )


@pytest.mark.parametrize(
    ("keys", "node", "gib"),
    [
        ({"decode_instances": 3}, {"CPU": 8.0}, 3),
        ({"decode_instances": 3}, {"CPU": 0.5}, 2),
        ({"decode.pp": 4, "decode.hosts": 2}, {"CPU": 0.5}, 0.5),
        ({"decode.pp": 4, "decode.hosts": 2, "decode_instances": 2}, {"CPU": 1.75}, 1.75),
        ({"decode.pp": 4}, {"CPU": 0.75}, 0),
        ({"decode.pp": 4, "decode_instances": 2}, {"CPU": 1.75}, 1),
    ],
)
def test_a_node_needs_memory_for_the_parts_of_instances_that_it_could_hold(
    keys: dict[str, int], node: dict[str, float], gib: float
) -> None:
    config = load(None, {}, {"engine.kv_bytes": 1 << 30, **keys})
    assert most_kv_bytes(config, node) == gib * 2**30


def test_an_instance_may_be_on_several_hosts() -> None:
    keys = {
        "decode.tp": 4,
        "decode.pp": 2,
        "decode.hosts": 2,
        "engine.device": "cuda",
        "prefill_instances": 0,
    }
    config = load(None, {}, keys)
    assert pools_of(config)["DecodePool"].placement_group_strategy == "PACK"
    host = {"CPU": 64.0, "GPU": 4.0}
    assert no_room(config, [host, host]) == ""
    assert no_room(config, [host, {"CPU": 64.0, "GPU": 3.0}]) == (
        "decode: an instance of 8 ranks must be on 2 hosts, and so many nodes have no 2 CPU, 8 GPU"
    )


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"decode.tp": 4, "decode.hosts": 2},
            "groups stay together, and an instance has 1",
        ),
        ({"decode.pp": 2, "decode.hosts": 2, "transfer.transport": "shm"}, "shm leaves no host"),
        (
            {"decode.pp": 2, "decode.hosts": 2, "engine.host_cache_bytes": 1 << 20},
            "need ranks on one host",
        ),
    ],
)
def test_what_several_hosts_cannot_do_is_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(None, {}, keys)


def serve_file(**deployment: Any) -> dict[str, Any]:
    args = {"decode": {"tp": 2, "pp": 2}}
    application = {
        "name": "baton",
        "import_path": "cluster.deploy.serve_app:build",
        "route_prefix": None,
        "args": args,
        "deployments": [{"name": "DecodePool", **deployment}],
    }
    return {"proxy_location": "Disabled", "applications": [application]}


def test_a_serve_file_may_say_what_each_bundle_asks_for() -> None:
    bundles = [{"CPU": 2, "GPU": 2, "decode": 1}] * 2
    check_serve_file(serve_file())
    check_serve_file(
        serve_file(
            ray_actor_options={"num_cpus": 0},
            placement_group_bundles=bundles,
            placement_group_strategy="STRICT_PACK",
        )
    )


def test_a_serve_file_may_leave_room_for_several_hosts() -> None:
    content = serve_file(placement_group_bundles=[{"CPU": 1}] * 2, placement_group_strategy="PACK")
    with pytest.raises(ConfigError, match="may be on 1 host: set placement_group_strategy: STRICT_PACK"):
        check_serve_file(content)
    content["applications"][0]["args"]["decode"]["hosts"] = 2
    check_serve_file(content)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"ray_actor_options": {"num_cpus": 0, "num_gpus": 4}}, "num_gpus"),
        ({"ray_actor_options": {"resources": {"decode": 1}}}, "num_cpus: 0"),
        ({"placement_group_bundles": [{"CPU": 1}] * 3}, "evenly over 3 bundles"),
        ({"placement_group_bundles": [{"CPU": 1}] * 2}, "placement_group_strategy: STRICT_PACK"),
    ],
)
def test_what_ray_could_not_place_is_refused_before_it_is_asked(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_serve_file(serve_file(**given))
