"""When experts move, and that nobody who is served notices."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from cluster.local import LocalCluster
from core.plan import ExpertLoad
from engine.ranks.expert_balancer import Balancer
from parallel.balance import first_placement, imbalance
from parallel.moves import moved
from tests.parallel.test_served import answers, checkpoint, settings

SKEWED = (900, 300, 20, 20, 20, 20, 20, 20)
FIRST = first_placement(8, 4, 4)


def loads(factor: int = 1) -> list[ExpertLoad]:
    return [ExpertLoad(3, tuple(factor * count for count in SKEWED))]


def test_it_moves_experts_when_it_is_time_and_enough_is_known() -> None:
    balancer = Balancer(FIRST, 4, 10.0, 100.0, most=99)
    (seen,) = balancer.observe(loads())
    assert seen.imbalance == pytest.approx(imbalance(FIRST, SKEWED, 4))
    assert balancer.next_moves(109.0) == {}
    moving = balancer.next_moves(110.0)
    assert list(moving) == [3]
    placed = moved(FIRST, moving[3])
    assert imbalance(placed, SKEWED, 4) < seen.imbalance - 0.2
    assert balancer.placement(3) == placed
    assert balancer.placement(4) == FIRST
    (seen,) = balancer.observe(loads())
    assert seen.imbalance == pytest.approx(imbalance(placed, SKEWED, 4))
    assert seen.num_moves == len(moving[3])
    assert balancer.next_moves(111.0) == {}
    assert balancer.next_moves(121.0) == {}, "nothing better is known"


def test_one_layer_moves_at_a_time_the_most_uneven_first_and_a_few_experts_before_each_step() -> None:
    at_once = Balancer(FIRST, 4, 10.0, 0.0, most=99)
    balancer = Balancer(FIRST, 4, 10.0, 0.0, most=1)
    hot_last, mild = ExpertLoad(3, SKEWED[::-1]), ExpertLoad(1, (100, 100, 100, 100, 100, 100, 200, 300))
    for one in (at_once, balancer):
        one.observe([mild, hot_last, ExpertLoad(2, (200, 200, 200, 200, 100, 100, 100, 100))])
    wanted = {layer: moves for now in (10, 11, 12) for layer, moves in at_once.next_moves(now).items()}
    assert list(wanted) == [3, 1]
    slots = dict.fromkeys((1, 2, 3), FIRST)
    order: list[int] = []
    for step in range(20):
        for layer, moves in balancer.next_moves(10.0 + step / 10).items():
            assert len(moves) <= 4, "more than one for a rank"
            slots[layer] = moved(slots[layer], moves)
            assert balancer.placement(layer) == slots[layer]
            order.append(layer)
    assert order == sorted(order, reverse=True)
    assert len(order) > len(wanted)
    assert slots == {layer: moved(FIRST, wanted.get(layer, ())) for layer in slots}


def test_little_evidence_and_an_interval_of_zero_move_nothing() -> None:
    few = Balancer(FIRST, 4, 10.0, 0.0, most=1)
    few.observe([ExpertLoad(0, (20, 1, 0, 0, 0, 0, 0, 0))])
    assert few.next_moves(11.0) == {}
    never = Balancer(FIRST, 4, 0.0, 0.0, most=1)
    never.observe(loads(100))
    assert never.next_moves(1e9) == {}


@pytest.mark.slow
@pytest.mark.turns(3)
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("family", "axis"), [("mixtral", "ep"), ("deepseek_v3", "dp")])
async def test_tokens_stay_the_same_while_experts_move(
    family: str, axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.ranks.expert_balancer.MIN_CHOICES", 1)
    prompts, want = checkpoint(tmp_path, family)
    keys = {
        "prefill_instances": 0,
        f"decode.{axis}": 2,
        "decode.ep_redundant_experts": 2,
        "decode.ep_move_bytes": 1,
        "engine.prefix_cache": False,
    }
    config = settings(tmp_path, **keys, **{"decode.ep_balance_interval_s": 0.05})
    async with LocalCluster.running(config) as cluster:
        async with asyncio.timeout(120):
            while not (status := await cluster.frontend.status()).instances[0].expert_moves:
                assert await answers(cluster, prompts) == want
        assert await answers(cluster, prompts) == want
        (instance,) = status.instances
        assert all(1.0 <= found <= 2.0 for _, found in instance.expert_imbalance)
        assert {one.layer for one in status.experts} == {layer for layer, _ in instance.expert_imbalance}
        assert sum(sum(one.counts) for one in status.experts) > 0
        assert len(dataclasses.asdict(status)["experts"][0]["counts"]) == len(status.experts[0].counts)
