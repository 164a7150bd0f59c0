"""Two tenants of equal weight, one with three times as many clients, who each ask again as soon as they are answered."""

import random

import pytest

from core.types import Slo
from sim.catalogue.cost import StepCost
from sim.simulated_cluster import simulate
from sim.simulated_run import Arrival, SimConfig
from sim.virtual_loop import run_virtual

pytestmark = [pytest.mark.slow, pytest.mark.turns(3)]
CLIENTS, TURNS = {"many": 60, "few": 20}, {"many": 9, "few": 18}
FROM_S, TO_S = 5.0, 20.0
"""Both have work waiting all this time."""


def arrivals() -> list[Arrival]:
    rng, found = random.Random(3), list[Arrival]()
    for tenant, count in CLIENTS.items():
        for _ in range(count):
            for turn in range(TURNS[tenant]):
                found.append(
                    Arrival(
                        at=0.01 if turn else rng.uniform(0, 0.2),
                        prompt=tuple(rng.randrange(1000) for _ in range(rng.randint(100, 300))),
                        max_tokens=rng.randint(30, 90),
                        seed=1,
                        tenant=tenant,
                        follows=len(found) - 1 if turn else None,
                    )
                )
    return found


@pytest.mark.parametrize(
    ("ttft_s", "num_ingresses", "num_schedulers"),
    [(30.0, 1, 1), (30.0, 2, 2), (1.0, 1, 1), (1.0, 2, 1), (0.3, 1, 1), (1.0, 1, 2)],
)
def test_both_get_as_many_tokens(ttft_s: float, num_ingresses: int, num_schedulers: int) -> None:
    """With 30 s all are in time. With less, most are late."""
    work = arrivals()
    config = SimConfig(
        num_prefill=0,
        num_decode=0,
        num_both=1,
        num_blocks=400,
        num_ingresses=num_ingresses,
        step=StepCost(overhead_s=0.01, tokens_per_s=20_000.0),
        slo=Slo(name="chat", ttft_s=ttft_s, tpot_s=0.1),
        overrides={"serve.schedulers": num_schedulers},
    )
    outcome = run_virtual(simulate(config, work))
    tokens = dict.fromkeys(CLIENTS, 0)
    for arrival, arrived_at, times in zip(work, outcome.arrived_at, outcome.token_times, strict=True):
        tokens[arrival.tenant] += sum(FROM_S <= arrived_at + at < TO_S for at in times)
    assert tokens["many"] / tokens["few"] == pytest.approx(1.0, abs=0.1)
