"""What instances report of their experts, as `/metrics` and `/cluster` say it."""

from prometheus_client import CollectorRegistry, generate_latest

from cluster.ingress.telemetry.metrics import InstanceMetrics
from core.reports import LayerExperts
from tests.cluster.scheduler.routing_world import World, instance, report

FIRST = (LayerExperts(1, 1.5, (3, 1), 5), LayerExperts(2, 1.0, (2, 2), 2))


def test_choices_add_up_and_imbalance_is_each_instances_own() -> None:
    world = World(instance("d"), instance("p", "p"))
    world.on(report("d", experts=FIRST))
    world.on(report("p", experts=(LayerExperts(1, 2.0, (10, 0)),)))
    world.on(report("d"))
    status = world.scheduler.status()
    assert status.experts == (LayerExperts(1, 2.0, (13, 1), 5), LayerExperts(2, 1.0, (2, 2), 2))
    registry = CollectorRegistry()
    InstanceMetrics(registry, "m").update(status)
    lines = generate_latest(registry).decode().splitlines()
    name = "baton_instance_expert_imbalance_ratio"
    assert f'{name}{{address="d",layer="1",role="decode"}} 1.5' in lines
    assert f'{name}{{address="p",layer="1",role="prefill"}} 2.0' in lines
    assert sum(line.startswith(name) for line in lines) == 3
    assert 'baton_instance_expert_moves_total{address="d",role="decode"} 7.0' in lines
