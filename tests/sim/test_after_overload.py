"""What is late after too much has come leaves room, in the coarse simulation, for what comes next."""

import pytest

from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import simulate
from tests.sim.chat_load import chat_class, offered, one_instance, share_in_time

CHAT = chat_class(tpot_s=0.04)
FLEET = one_instance(weights_read_s=0.008, kv_token_read_s=1e-6, num_blocks=10_000)
"""A step takes what the class promises with about sixty sequences, which live for about twenty seconds: three come a second."""
FLOOD_S, LASTS_S = 15.0, 120.0


def served(flood: float, after: float) -> list[SimulatedRequest]:
    """Serve so many requests per second for `FLOOD_S`, and then so many."""
    work = offered(
        FLEET,
        CHAT,
        lambda at: flood if at < FLOOD_S else after,
        lambda rng: 500 * rng.lognormvariate(-0.1, 0.4),
        LASTS_S,
    )
    simulate(FLEET, work)
    return work


@pytest.mark.slow
@pytest.mark.turns(3)
@pytest.mark.parametrize(("flood", "after"), [(6.0, 2.2), (12.0, 1.5), (12.0, 2.6)])
def test_all_are_in_time_that_come_a_while_after_a_flood(flood: float, after: float) -> None:
    work = served(flood, after)
    assert share_in_time(work) < 0.95, "in the flood some are late"
    assert share_in_time([job for job in work if job.request.arrival_at >= 2 * FLOOD_S]) > 0.98


def test_what_is_late_is_served_where_there_is_room_again() -> None:
    assert not any(job.rejected for job in served(6.0, 1.5))
