"""Cards that a prefill and a decode instance share: what each has of them, how they slow each other down, and plans with them."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.bench.traces import TraceRow
from baton.plan_picture import draw_plan
from baton.plan_report import PlanFinding, as_json
from core.config.cluster_config import load
from core.cost.memory_model import GPU_RESERVE_BYTES
from core.cost.steps import chunk_pairs
from core.errors import ConfigError
from core.types import Slo
from sim.catalogue.catalogue import GPUS, MODELS, num_blocks, step_cost
from sim.catalogue.cost import BESIDE
from sim.catalogued import Fleet, coarse_config, full_config
from sim.coarse.coarse_workload import Load, jobs
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import CoarseConfig, simulate
from sim.planning.plan_demand import trace_demand
from sim.planning.plan_fleets import Hardware
from sim.planning.plan_trial import stand_in
from sim.planning.planner import Targets, plan
from sim.shared_cards import CardShare, CardShares, possible_shares, shared_cost

GPU, MODEL = GPUS["H100"], MODELS["llama-3.1-8b"]
SHARES = CardShares(CardShare(0.3, 0.5), CardShare(0.7, 0.5))
ONE = Fleet(gpu="H100", model="llama-3.1-8b", num_prefill=1, num_decode=1, shares=SHARES)
SMALL = shared_cost(GPU, MODEL, *SHARES.both_ways[0])
SLO = Slo(name="t", ttft_s=1e9, tpot_s=1e9)


def test_steps_on_a_shared_card_take_as_many_times_as_long_as_on_the_one_that_was_measured() -> None:
    """An H200: prompts of 2,048 tokens with 0.6 of the processors, 64 sequences of 1,024 tokens with 0.4."""
    gpu, prefill, decode = GPUS["H200"], CardShare(0.5, 0.6), CardShare(0.5, 0.4)
    prompt, tokens = (2048, 2048, chunk_pairs(0, 2048), 1), (64, 64 * 1024, 64 * 1024, 64)
    whole = step_cost(gpu, MODEL)
    for own, other, step, alone, beside in (
        (prefill, decode, prompt, 1.44, 1.86),
        (decode, prefill, tokens, 1.36, 1.81),
    ):
        cost, whole_s = shared_cost(gpu, MODEL, own, other), whole.step_s(*step)
        assert cost.step_s(*step) / whole_s == pytest.approx(alone, rel=0.03)
        assert cost.step_s(*step, beside=True) / whole_s == pytest.approx(beside, rel=0.03)
        assert cost.alone().step_s(*step) == pytest.approx(cost.step_s(*step))


def test_bounds_of_more_than_a_card_divide_it_while_both_run() -> None:
    whole = step_cost(GPU, MODEL)
    half, all_of_it = CardShare(0.5, 0.5), CardShare(0.5, 1.0)
    crowded = shared_cost(GPU, MODEL, all_of_it, all_of_it)
    assert crowded.step_s(8192, 0, 0, 1) == pytest.approx(whole.step_s(8192, 0, 0, 1))
    alike = shared_cost(GPU, MODEL, half, half).step_s(8192, 0, 0, 1, beside=True)
    assert crowded.step_s(8192, 0, 0, 1, beside=True) == pytest.approx(alike)


def test_a_card_is_shared_as_the_configuration_allows_and_both_have_room_by_the_memory_model() -> None:
    found = possible_shares(GPU, MODEL)
    assert len(found) == 3
    for shares in found:
        given = {
            name: {"gpu_share": share.memory, "sm_share": share.processors}
            for name, share in (("prefill", shares.prefill), ("decode", shares.decode))
        }
        config = load({**given, "engine": {"device": "cuda"}}, {}, {})
        assert config.prefill.gpu_share + config.decode.gpu_share == pytest.approx(1.0)
        for share in (shares.prefill, shares.decode):
            kv_bytes = 0.9 * GPU.memory_bytes * share.memory - GPU_RESERVE_BYTES - MODEL.total_bytes
            room = kv_bytes / (64 * MODEL.kv_token_bytes)
            assert num_blocks(GPU, MODEL, 64, 1, share.memory) == pytest.approx(room, abs=1)
    assert possible_shares(GPU, MODELS["llama-3.1-70b"]) == [], "no room for the weights"
    shared = Hardware(model="llama-3.1-8b", gpus=("H100", "L40S")).shared(64)
    assert {one.gpu for one in shared} == {"H100", "L40S"}
    assert Hardware(model="llama-3.1-70b", gpus=("H100",)).shared(64) == []


def test_two_instances_have_the_price_of_one_card() -> None:
    assert ONE.dollars_per_h == GPU.dollars_per_h
    assert ONE.resized(3).dollars_per_h == pytest.approx(3 * GPU.dollars_per_h)
    assert (ONE.resized(3).num_prefill, ONE.resized(3).num_decode) == (3, 3)


def served(config: CoarseConfig, rows: list[TraceRow]) -> list[SimulatedRequest]:
    work = jobs(Load(rows=rows, duration_s=100.0), SLO, 64)
    outcome = simulate(config, work)
    return list(outcome.jobs)


def row(at: float, num_prompt: int, num_output: int) -> TraceRow:
    return TraceRow(arrival_at=at, input_tokens=num_prompt, output_tokens=num_output)


def short_prompts_beside_an_answer() -> list[TraceRow]:
    return [row(0.0, 500, 1000), *(row(0.5 + 0.015 * number, 100, 1) for number in range(600))]


def test_prompts_slow_down_the_tokens_of_their_card_and_of_no_other() -> None:
    """The same instances on two cards, of as many processors each, are the measure."""
    rows = short_prompts_beside_an_answer()
    shared = coarse_config(ONE, 64)
    apart = replace(
        shared,
        step=SMALL.alone(),
        cards="",
        others=tuple(replace(group, step=SMALL.alone(), cards="") for group in shared.others),
    )
    answers = {name: served(config, rows)[0] for name, config in (("shared", shared), ("apart", apart))}
    took = {name: job.last_at - job.first_at for name, job in answers.items()}
    alone = served(shared, rows[:1])[0]
    assert 1.1 * took["apart"] < took["shared"] < BESIDE * took["apart"]
    assert alone.last_at - alone.first_at == pytest.approx(took["apart"], rel=0.02)


def test_the_first_of_both_share_a_card_and_so_do_the_second() -> None:
    """The prompts are computed on two cards, and half of them beside the one answer."""
    rows = short_prompts_beside_an_answer()
    one, two = (coarse_config(ONE.resized(count), 64) for count in (1, 2))
    assert [(group.num_prefill, group.num_decode) for group in two.groups] == [(2, 0), (0, 2)]
    held_up, less = (served(config, rows)[0] for config in (one, two))
    assert less.last_at - less.first_at < 0.95 * (held_up.last_at - held_up.first_at)


def test_more_processors_for_prompts_are_fewer_for_tokens() -> None:
    prompts = [row(0.4 * number, 8000, 1) for number in range(20)]
    firsts, lasts = [], []
    for prefill in (0.3, 0.7):
        shares = CardShares(CardShare(0.3, prefill), CardShare(0.7, 1 - prefill))
        config = coarse_config(replace(ONE, shares=shares), 64)
        firsts.append(sum(job.first_at - job.request.arrival_at for job in served(config, prompts)))
        (answer,) = served(config, [row(0.0, 500, 1000)])
        lasts.append(answer.last_at - answer.first_at)
    assert firsts[0] > 1.5 * firsts[1]
    assert lasts[1] > 1.3 * lasts[0]


def test_a_plan_tries_shared_cards_and_says_their_shares(tmp_path: Path) -> None:
    """No card alone holds so short a time for a token beside so many long prompts, so all ways to use one are tried."""
    rows = [row(number / 1.35, 8000, 500) for number in range(74)]
    targets = Targets(slo=Slo(name="t", ttft_s=3.0, tpot_s=0.011), attainment=0.95, max_instances=4)
    demand = trace_demand(rows, Hardware(model="llama-3.1-8b", gpus=("H100",)), targets)
    found = plan(demand)
    assert found.best is not None
    assert found.best.name == "2 H100 any role"
    (shared,) = (trial for trial in found.trials if trial.parts[0].shares is not None)
    assert shared.name == (
        "1 H100 shared by prefill (gpu_share 0.3, sm_share 0.3) and decode (gpu_share 0.7, sm_share 0.7)"
    )
    assert shared.dollars_per_h == GPU.dollars_per_h
    said = [part for trial in as_json(PlanFinding(demand, found))["trials"] for part in trial["parts"]]
    (part,) = (part for part in said if part["shares"] is not None)
    assert part["shares"]["decode"] == {"memory": 0.7, "processors": 0.7}
    assert (part["prefill"], part["decode"], part["both"]) == (1, 1, 0)
    draw_plan(found.trials, found.best, 0.95, "a title", tmp_path / "plan.svg")


def test_of_a_large_fleet_of_shared_cards_a_part_is_simulated() -> None:
    (few,), share = stand_in((ONE.resized(40),))
    assert few.num_prefill == few.num_decode == few.num_units <= 8
    assert share == pytest.approx(few.num_units / 40)


def test_the_full_simulation_refuses_shared_cards() -> None:
    with pytest.raises(ConfigError, match="use the coarse one"):
        full_config(ONE, SLO)
