"""The metrics of pools: how large each shall be, how many instances of it serve or sleep, and what scaling has done."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from core.reports import PoolStatus, Status


def pool_metrics(status: Status) -> Iterator[Metric]:
    """Yield the pools' sizes, what scaling has done where they follow their load, and which instances sleep."""
    wanted = GaugeMetricFamily("baton_pool_wanted_instances", "Size that it shall have", labels=("pool",))
    serving = GaugeMetricFamily(
        "baton_pool_serving_instances",
        "Instances that live and do not drain, also those that sleep",
        labels=("pool",),
    )
    for pool in status.pools:
        wanted.add_metric((pool.pool,), pool.wanted)
        serving.add_metric((pool.pool,), _num_serving(status, pool.pool))
    if status.pools:
        yield from (wanted, serving)
    if scaled := [pool for pool in status.pools if pool.cold_start_s]:
        yield from _scaling(scaled)
    yield from _sleeping(status)


def _num_serving(status: Status, pool: str) -> int:
    living = [one for one in status.instances if not one.leaving]
    there = [one.decodes for one in living] + [one.decodes for one in status.sleepers]
    return sum(decodes == (pool == "decode") for decodes in there)


def _sleeping(status: Status) -> Iterator[Metric]:
    """Yield each instance that does not serve now, with its state and with how long waking it would take."""
    level = GaugeMetricFamily(
        "baton_instance_sleep_level",
        "Level at which it sleeps: 1 with its weights in host memory, 2 without",
        labels=("address", "role", "state"),
    )
    wakes = GaugeMetricFamily(
        "baton_instance_wake_seconds", "Predicted time that waking up takes", labels=("address", "role")
    )
    for one in status.sleepers:
        role = "both" if one.prefills and one.decodes else "prefill" if one.prefills else "decode"
        level.add_metric((one.address, role, one.state), one.level)
        wakes.add_metric((one.address, role), one.wake_s)
    yield from (level, wakes)


def _scaling(pools: list[PoolStatus]) -> Iterator[Metric]:
    cold = GaugeMetricFamily(
        "baton_pool_cold_start_seconds", "From a decision until a new instance serves", labels=("pool",)
    )
    resized = CounterMetricFamily(
        "baton_pool_resizes", "How often it was made larger or smaller", labels=("pool", "direction")
    )
    for pool in pools:
        cold.add_metric((pool.pool,), pool.cold_start_s)
        resized.add_metric((pool.pool, "up"), pool.num_grown)
        resized.add_metric((pool.pool, "down"), pool.num_shrunk)
    yield from (cold, resized)
