"""Prometheus is told how large each pool shall be and how many instances of it serve."""

from prometheus_client import CollectorRegistry

from cluster.ingress.telemetry.metrics import InstanceMetrics
from core.reports import InstanceStatus, PoolStatus, Status
from core.sleep_messages import Asleep


def instance(address: str, *, prefills: bool, decodes: bool, leaving: bool = False) -> InstanceStatus:
    return InstanceStatus(
        address=address,
        prefills=prefills,
        decodes=decodes,
        num_blocks=8,
        free_blocks=8,
        num_waiting=0,
        num_running=0,
        defect="",
        leaving=leaving,
    )


def read(status: Status) -> CollectorRegistry:
    registry = CollectorRegistry()
    InstanceMetrics(registry, "m").update(status)
    return registry


def test_an_instance_that_is_missing_or_drains_shows() -> None:
    instances = (
        instance("p", prefills=True, decodes=False),
        instance("d", prefills=False, decodes=True),
        instance("both", prefills=True, decodes=True),
        instance("leaving", prefills=False, decodes=True, leaving=True),
    )
    pools = (PoolStatus(pool="decode", wanted=3), PoolStatus(pool="prefill", wanted=1))
    registry = read(Status(nonce=0, why_not="", num_queued=0, instances=instances, pools=pools))
    figures = {
        pool: [
            registry.get_sample_value(f"baton_pool_{what}_instances", {"pool": pool})
            for what in ("wanted", "serving")
        ]
        for pool in ("decode", "prefill")
    }
    assert figures == {"decode": [3.0, 2.0], "prefill": [1.0, 1.0]}
    assert registry.get_sample_value("baton_pool_cold_start_seconds", {"pool": "decode"}) is None


def test_instances_that_hung_are_counted() -> None:
    registry = read(Status(nonce=0, why_not="", num_queued=0, instances=(), num_hung=2))
    assert registry.get_sample_value("baton_instances_hung_total") == 2.0


def test_what_scaling_does_is_there_where_pools_follow_their_load() -> None:
    pool = PoolStatus(pool="decode", wanted=3, num_grown=2, cold_start_s=41.0)
    registry = read(Status(nonce=0, why_not="", num_queued=0, instances=(), pools=(pool,)))
    assert registry.get_sample_value("baton_pool_cold_start_seconds", {"pool": "decode"}) == 41.0
    up = {"pool": "decode", "direction": "up"}
    assert registry.get_sample_value("baton_pool_resizes_total", up) == 2.0


def test_an_instance_that_sleeps_is_not_missing_and_says_when_it_would_be_awake() -> None:
    sleeper = Asleep(address="d", state="asleep", level=1, prefills=False, decodes=True, wake_s=0.25)
    pools = (PoolStatus(pool="decode", wanted=1),)
    status = Status(nonce=0, why_not="", num_queued=0, instances=(), pools=pools, sleepers=(sleeper,))
    registry, who = read(status), {"address": "d", "role": "decode"}
    assert registry.get_sample_value("baton_pool_serving_instances", {"pool": "decode"}) == 1
    assert registry.get_sample_value("baton_instance_sleep_level", {**who, "state": "asleep"}) == 1
    assert registry.get_sample_value("baton_instance_wake_seconds", who) == 0.25
