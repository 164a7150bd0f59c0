"""Tenants in both simulations: who is heavier gets more, limits hold, and a class is the tenant's own."""

from dataclasses import replace
from math import inf

import pytest

from baton.bench.traces import TraceRow
from baton.simulation import Study, TraceWorkload
from core.config.cluster_config import load
from core.types import Slo
from sim.catalogued import Fleet
from sim.outcome_report import ServedRequest, by_tenant

EVERYBODY = Slo(name="all", ttft_s=2.0, tpot_s=0.1)
FLEET = Fleet(gpu="H100", model="llama-3.1-8b", num_prefill=0, num_decode=0, num_both=1)


def rows(count: int, per_s: float, clients: tuple[str, ...], num_prompt: int = 500) -> list[TraceRow]:
    return [
        TraceRow(
            arrival_at=i / per_s, input_tokens=num_prompt, output_tokens=10, client=clients[i % len(clients)]
        )
        for i in range(count)
    ]


def served(work: list[TraceRow], coarse: bool, tenants: dict[str, dict[str, object]]) -> list[ServedRequest]:
    content = {
        "tenants": {name: {"keys": [f"key-of-{name}"], **rules} for name, rules in tenants.items()},
        "slo_classes": {"patient": {"ttft_s": 100.0, "tpot_s": 10.0}},
    }
    study = Study(
        workload=TraceWorkload(work, 1000.0),
        fleet=FLEET,
        slo=EVERYBODY,
        seconds=1000.0,
        seed=0,
        coarse=coarse,
        config=load(content, {}, {}),
    )
    return study.run(1)[0]


def mean_ttft_s(found: list[ServedRequest], tenant: str) -> float:
    times = [one.ttft_s for one in found if one.tenant == tenant and one.ttft_s < inf]
    return sum(times) / len(times)


@pytest.mark.parametrize("coarse", [True, False])
def test_the_heavier_of_two_tenants_waits_less(coarse: bool) -> None:
    work = rows(120, 1000.0, ("light", "heavy"), num_prompt=8000)
    found = served(work, coarse, {"heavy": {"weight": 4.0}, "light": {"weight": 1.0}})
    even = served(work, coarse, {})
    assert mean_ttft_s(found, "heavy") < 0.8 * mean_ttft_s(found, "light")
    assert mean_ttft_s(even, "heavy") == pytest.approx(mean_ttft_s(even, "light"), rel=0.1)


@pytest.mark.parametrize("coarse", [True, False])
def test_a_tenant_gets_no_more_than_its_limit(coarse: bool) -> None:
    """All come within ten seconds."""
    found = by_tenant(
        served(rows(200, 20.0, ("bound", "free")), coarse, {"bound": {"max_requests_per_min": 6}}), EVERYBODY
    )
    assert found["bound"]["num_finished"] == 6
    assert found["free"]["num_finished"] == 100
    assert found["bound"]["attainment"] < 0.1, "who was refused has missed"


@pytest.mark.parametrize("coarse", [True, False])
def test_a_tenant_has_only_so_many_at_once(coarse: bool) -> None:
    found = served(rows(40, 1000.0, ("bound",)), coarse, {"bound": {"max_concurrent": 3}})
    assert sum(one.e2e_s < inf for one in found) == 3


def test_a_tenant_is_held_to_its_own_class() -> None:
    found = served(
        rows(60, 1000.0, ("impatient", "patient"), 8000), True, {"patient": {"slo_classes": ["patient"]}}
    )
    shares = {name: one["attainment"] for name, one in by_tenant(found, EVERYBODY).items()}
    assert shares["patient"] == 1.0
    assert shares["impatient"] < 1.0


def test_clients_share_no_prefixes() -> None:
    same = [
        replace(row, prefix_ids=tuple(range(16)), prefix_block_tokens=512)
        for row in rows(8, 0.5, ("a", "b"), 8192)
    ]
    firsts = {one.tenant: one.ttft_s for one in reversed(served(same, True, {}))}
    apart = served(same, True, {})
    together = served([replace(row, client="a") for row in same], True, {})
    assert apart[1].ttft_s == pytest.approx(firsts["a"], rel=0.01), (
        "the other's first prompt is computed whole"
    )
    assert together[1].ttft_s < 0.5 * apart[1].ttft_s
