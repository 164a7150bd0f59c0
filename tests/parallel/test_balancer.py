"""When experts move, and that nobody who is served notices."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from cluster.local import LocalCluster
from core.plan import ExpertLoad
from engine.ranks.balancing import Balancer
from parallel.balance import first_placement, imbalance
from tests.parallel.test_served import answers, checkpoint, settings

SKEWED = (900, 300, 20, 20, 20, 20, 20, 20)
FIRST = first_placement(8, 4, 4)


def loads(factor: int = 1) -> list[ExpertLoad]:
    return [ExpertLoad(3, tuple(factor * count for count in SKEWED))]


def test_it_moves_experts_when_it_is_time_and_enough_is_known() -> None:
    balancer = Balancer(FIRST, 4, 10.0, now=100.0)
    (seen,) = balancer.observe(loads())
    assert seen.imbalance == pytest.approx(imbalance(FIRST, SKEWED, 4))
    assert balancer.decide(109.0) == {}
    moving = balancer.decide(110.0)
    assert list(moving) == [3]
    assert imbalance(moving[3], SKEWED, 4) < seen.imbalance - 0.2
    assert balancer.placement(3) == moving[3]
    assert balancer.placement(4) == FIRST
    (seen,) = balancer.observe(loads())
    assert seen.imbalance == pytest.approx(imbalance(moving[3], SKEWED, 4))
    assert balancer.decide(111.0) == {}
    assert balancer.decide(121.0) == {}, "nothing better is known"


def test_little_evidence_and_an_interval_of_zero_move_nothing() -> None:
    few = Balancer(FIRST, 4, 10.0, now=0.0)
    few.observe([ExpertLoad(0, (20, 1, 0, 0, 0, 0, 0, 0))])
    assert few.decide(11.0) == {}
    never = Balancer(FIRST, 4, 0.0, now=0.0)
    never.observe(loads(100))
    assert never.decide(1e9) == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("family", "axis"), [("mixtral", "ep"), ("deepseek_v3", "dp")])
async def test_tokens_stay_the_same_while_experts_move(
    family: str, axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.ranks.balancing._MIN_CHOICES", 1)
    caplog.set_level("INFO", "engine.ranks.balancing")
    prompts, want = checkpoint(tmp_path, family)
    keys = {
        "prefill_instances": 0,
        f"decode.{axis}": 2,
        "decode.ep_redundant_experts": 2,
        "engine.prefix_cache": False,
    }
    config = settings(tmp_path, **keys, **{"decode.ep_balance_interval_s": 0.05})
    async with LocalCluster.running(config) as cluster:
        async with asyncio.timeout(120):
            while "layers move" not in caplog.text:
                assert await answers(cluster, prompts) == want
        assert await answers(cluster, prompts) == want
        async with asyncio.timeout(30):
            while not (status := await cluster.frontend.status()).experts:
                assert await answers(cluster, prompts) == want
        (instance,) = status.instances
        assert all(1.0 <= found <= 2.0 for _, found in instance.expert_imbalance)
        assert {one.layer for one in status.experts} == {layer for layer, _ in instance.expert_imbalance}
        assert sum(sum(one.counts) for one in status.experts) > 0
        assert len(dataclasses.asdict(status)["experts"][0]["counts"]) == len(status.experts[0].counts)
