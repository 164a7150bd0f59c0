"""Each baseline does what its authors say it does."""

from collections import Counter

import pytest

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.placement_policy import PlacementQuery
from core.cost.steps import StepModel, StepModels
from core.errors import ConfigError
from core.reports import LoadReport, Register
from core.types import Slo
from sim.baselines.arrow import Arrow
from sim.baselines.dispatch import Offer
from sim.baselines.dynamo import Dynamo
from sim.baselines.early_rejection import EarlyRejection
from sim.baselines.least_loaded import LeastLoaded
from sim.baselines.llm_d import LlmD
from sim.baselines.mooncake import Mooncake
from sim.baselines.polyserve import PolyServe
from sim.baselines.power_of_two import PowerOfTwo
from sim.baselines.ray_affinity import RayAffinity
from sim.baselines.round_robin import RoundRobin
from sim.baselines.sarathi import Sarathi, token_budget
from sim.baselines.table import OURS, SCHEDULERS, entry_of
from sim.catalogue.cost import StepCost
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.world import CoarseConfig, simulate
from tests.sim.random_rows import random_rows

BLOCK = 16
STEPS = StepModels(
    StepModel(fixed_s=0.005, token_s=0.0, context_s=1e-8, seq_s=0.0005, num_steps=100),
    StepModel(fixed_s=0.0, token_s=1e-4, context_s=0.0, seq_s=0.0, num_steps=100),
)
"""Decoding: 5 ms and half a millisecond for each sequence. Prompts: 10,000 tokens a second."""
SLO = Slo(name="test", ttft_s=1.0, tpot_s=0.02)


def member(address: str, role: str = "pd", *, waiting: int = 0, running: int = 0, free: int = 1000) -> Member:
    info = Register(
        address=address,
        incarnation="1",
        prefills="p" in role,
        decodes="d" in role,
        host="h",
        block_size=BLOCK,
        num_blocks=1000,
        max_batch_tokens=8192,
        max_num_seqs=256,
    )
    one = Member(info)
    one.report(
        LoadReport(
            address=address,
            seq=1,
            free_blocks=free,
            waiting_tokens=waiting,
            num_waiting=0,
            num_running=running,
            tokens_per_s=1e4,
            step_s=0.01,
            num_decoding=running,
            context_tokens=running * 100,
            steps=STEPS,
        ),
        0.0,
    )
    return one


def offer(tokens: int = 320, hashes: tuple[int, ...] = (), slo: Slo = SLO, **cached: int) -> Offer:
    return Offer(PlacementQuery(tokens, cached), slo, hashes or tuple(range(tokens // BLOCK)))


def test_round_robin_takes_turns_in_both_pools() -> None:
    router, pool = RoundRobin(), [member("p1", "p"), member("p2", "p"), member("d1", "d"), member("d2", "d")]
    chosen = [router.choose(offer(), pool, 0.0) for _ in range(4)]
    assert [(c.prefill.address, c.decode.address) for c in chosen if c and c.prefill] == [
        ("p1", "d1"),
        ("p2", "d2"),
    ] * 2


def test_power_of_two_leaves_the_most_loaded_alone_and_all_others_some() -> None:
    pool = [member(f"d{i}", "d", running=i) for i in range(4)]
    router, counts = PowerOfTwo(), Counter[str]()
    for _ in range(600):
        choice = router.choose(offer(), pool, 0.0)
        assert choice is not None
        counts[choice.decode.address] += 1
    assert counts["d3"] == 0
    for index, share in enumerate((1 / 2, 1 / 3, 1 / 6)):  # pairs of four in which it is the smaller
        assert counts[f"d{index}"] / 600 == pytest.approx(share, abs=0.07)


def test_least_loaded() -> None:
    pool = [
        member("p1", "p", waiting=900),
        member("p2", "p", waiting=10),
        member("d1", "d", running=3),
        member("d2", "d", running=2),
    ]
    choice = LeastLoaded().choose(offer(), pool, 0.0)
    assert choice is not None
    assert choice.prefill is not None
    assert (choice.prefill.address, choice.decode.address) == ("p2", "d2")


def test_ray_affinity_follows_prefixes_until_queues_differ() -> None:
    pool = [member("d1", "d"), member("d2", "d")]
    router = RayAffinity(imbalanced_threshold=5)
    first = router.choose(offer(320, tuple(range(20))), pool, 0.0)
    other = router.choose(offer(320, tuple(range(100, 120))), pool, 0.0)
    again = router.choose(offer(400, (*range(20), 50, 51)), pool, 0.0)
    assert first is not None
    assert other is not None
    assert again is not None
    assert other.decode is not first.decode, "nothing matches: where the least text was routed"
    assert again.decode is first.decode
    crowded = [member("d1", "d", running=20), member("d2", "d")]
    spread = {router.choose(offer(400, tuple(range(20))), crowded, 0.0).decode.address for _ in range(20)}  # type: ignore[union-attr]
    assert spread == {"d2"}, "imbalanced: the shorter of two at random"


def test_llm_d_weighs_prefix_twice() -> None:
    whole = LlmD().choose(
        offer(320, a=20), [member("a", "d", running=0, free=0), member("b", "d", free=1000)], 0.0
    )
    assert whole is not None
    assert whole.decode.address == "a", "2 for all blocks cached against 1 for all blocks free"
    little = LlmD().choose(offer(320, a=8), [member("a", "d", free=0), member("b", "d", free=1000)], 0.0)
    assert little is not None
    assert little.decode.address == "b", "0.8 against 1"


def test_dynamo_adds_blocks_to_compute_and_blocks_in_use() -> None:
    pool = [member("a", "d", free=990), member("b", "d", free=1000)]
    for cached, expected in ((9, "b"), (11, "a")):
        choice = Dynamo().choose(offer(320, a=cached), pool, 0.0)
        assert choice is not None
        assert choice.decode.address == expected
    heavy = Dynamo(overlap_weight=2.0).choose(offer(320, a=6), pool, 0.0)
    assert heavy is not None
    assert heavy.decode.address == "a"


def test_mooncake_minimises_ttft_and_refuses_early() -> None:
    pool = [member("p1", "p", waiting=5000), member("p2", "p", waiting=4000), member("d1", "d", running=5)]
    with_cache = Mooncake().choose(offer(3200, p1=150), pool, 0.0)
    assert with_cache is not None
    assert with_cache.prefill is not None
    assert with_cache.prefill.address == "p1", "0.50 + 0.08 s against 0.40 + 0.32 s"
    assert Mooncake().choose(offer(8000), pool, 0.0) is None, "1.2 s at best"
    full = [member("p1", "p"), member("d1", "d", running=40)]
    assert Mooncake().choose(offer(), full, 0.0) is None, "25 ms a token"


def test_mooncake_of_any_role_takes_one_instance_for_both() -> None:
    pool = [
        member("a", waiting=4000, running=5),
        member("b", waiting=5000, running=1),
        member("c", running=40),
    ]
    choice = Mooncake().choose(offer(), pool, 0.0)
    assert choice is not None
    assert (choice.decode.address, choice.prefill) == ("a", None), "c is idle but 25 ms a token"
    assert Mooncake().choose(offer(8000), pool, 0.0) is None


def test_early_rejection_refuses_what_would_miss_where_its_router_sends_it() -> None:
    router = EarlyRejection(LeastLoaded())
    fine = router.choose(offer(), [member("p1", "p", waiting=5000), member("d1", "d", running=5)], 0.0)
    assert fine is not None
    assert fine.prefill is not None
    assert router.choose(offer(), [member("p1", "p", waiting=12_000), member("d1", "d")], 0.0) is None, (
        "1.2 s"
    )
    assert router.choose(offer(), [member("p1", "p"), member("d1", "d", running=40)], 0.0) is None, "25 ms"


@pytest.mark.parametrize(
    "name", ["least-loaded", "round-robin", "power-of-two", "dynamo", "llm-d", "ray-affinity"]
)
def test_with_any_role_each_instance_computes_the_prompts_that_it_decodes(name: str) -> None:
    config = CoarseConfig(num_prefill=0, num_decode=0, num_both=3, block_tokens=64, step=StepCost())
    work = jobs(Load(rows=random_rows(1, 40, 10.0), duration_s=1e9), Slo(ttft_s=2.0, tpot_s=0.1), 64)
    outcome = simulate(config, work, entry_of(f"{name}+any+refuse+engine").make)
    placed = [line.split() for line in outcome.decisions if line.startswith("place")]
    assert len(placed) == len(work)
    assert {line[2] for line in placed} == {"local"}
    assert {line[3] for line in placed} == {"both-1", "both-2", "both-3"}


def test_a_name_says_what_a_baseline_is_given() -> None:
    assert (entry_of("least-loaded").kind, entry_of("least-loaded+any").kind) == ("static", "dynamic")
    assert [entry_of(name).paced for name in ("sarathi", "sarathi+refuse", "sarathi+engine")] == [
        False,
        False,
        True,
    ]
    for wrong in ("sarathy", "sarathi+speed", "baton+any"):
        with pytest.raises(ConfigError, match="known:"):
            entry_of(wrong)


def test_polyserve_fills_one_instance_before_it_opens_the_next() -> None:
    router = PolyServe()
    pool = [member("a"), member("b"), member("c")]
    assert chosen(router, pool) == "a"
    pool = [member("a", running=3), member("b"), member("c")]
    assert chosen(router, pool) == "a"
    pool = [member("a", running=30), member("b"), member("c")]
    assert chosen(router, pool) == "b", "a is predicted to miss the time per token"
    pool = [member("a", running=30), member("b", running=10), member("c")]
    loose = Slo(name="loose", ttft_s=1.0, tpot_s=0.1)
    assert chosen(router, pool, loose) == "c", "another tier: another instance"
    pool = [member("a", running=30), member("b", running=10), member("c", running=250)]
    assert chosen(router, pool, loose) == "a", (
        "its own tier is full: promoted to the fullest of the tighter one that still holds"
    )


def chosen(router: PolyServe, pool: list[Member], slo: Slo = SLO) -> str:
    choice = router.choose(offer(slo=slo), pool, 0.0)
    assert choice is not None
    assert choice.prefill is None
    return choice.decode.address


def test_arrow_flips_roles_with_the_load() -> None:
    router = Arrow()
    pool = [member("a"), member("b"), member("c"), member("d")]
    choice = router.choose(offer(), pool, 0.0)
    assert choice is not None
    assert choice.prefill is not None
    assert choice.prefill.address in "ab"
    assert choice.decode.address in "cd"
    busy = [
        member("a", waiting=12_000),
        member("b", waiting=12_000),
        member("c", running=2),
        member("d", running=1),
    ]
    flipped = router.choose(offer(), busy, 0.0)
    assert flipped is not None
    assert flipped.prefill is not None
    assert flipped.prefill.address == "d", (
        "prefill would miss the first token: the decode instance with the least to do helps"
    )
    crowded = [member("a", waiting=100), member("b"), member("c", running=40), member("d", running=1)]
    back = router.choose(offer(), crowded, 0.0)
    assert back is not None
    assert back.decode.address != "c", "decode would miss the time per token: a prefill instance helps"


def test_sarathi_counts_work_and_bounds_the_step() -> None:
    pool = [member("a", waiting=500), member("b", waiting=100)]
    choice = Sarathi().choose(offer(), pool, 0.0)
    assert choice is not None
    assert choice.decode.address == "b"
    assert choice.prefill is None
    cached = Sarathi().choose(offer(3200, a=150), pool, 0.0)
    assert cached is not None
    assert cached.decode.address == "a"
    step = StepCost(overhead_s=0.002, tokens_per_s=20_000.0)
    assert [token_budget(step, limit) for limit in (0.06, 0.2, 0.001)] == [1024, 2048, 128]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_serves_a_light_load_within_its_targets(name: str) -> None:
    entry = SCHEDULERS[name]
    split = entry.kind == "static"
    config = CoarseConfig(
        num_prefill=2 * split,
        num_decode=2 * split,
        num_both=4 * (not split),
        block_tokens=64,
        step=StepCost(),
        mixed_batch_tokens=512,
    )
    work = jobs(Load(rows=random_rows(1, 80, 10.0), duration_s=1e9), Slo(ttft_s=2.0, tpot_s=0.1), 64)
    outcome = simulate(config, work, entry.make)
    assert all(job.num_output == job.max_tokens for job in outcome.jobs)
    assert max(job.first_at - job.request.arrival_at for job in outcome.jobs) < 2.0
    used = {line.split()[-1] for line in outcome.decisions if line.startswith("place")}
    assert len(used) > 1 or name == "polyserve" or name == OURS
