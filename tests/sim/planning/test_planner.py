"""The plan holds its targets, nothing cheaper that was tried does, and more load or tighter targets never cost less."""

import json
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image
from typer.testing import CliRunner

from baton.bench.traces import TraceRow
from baton.cli.main import app
from baton.plan_report import PlanFinding
from core.errors import ConfigError
from core.types import Slo
from sim.catalogue.catalogue import GPUS, MODELS, step_cost
from sim.catalogued import Fleet
from sim.planning.plan_demand import session_demand, trace_demand
from sim.planning.plan_effort import Effort
from sim.planning.plan_fleets import Hardware, families, kinds
from sim.planning.plan_load import columns_of
from sim.planning.plan_trial import stand_in, try_fleet
from sim.planning.planner import Demand, Plan, Targets, plan
from tests.sim.random_rows import random_rows
from tests.sim.test_agent_sessions import written

ROWS = random_rows(4, 60, 20.0)
CHAT = Targets(slo=Slo(name="t", ttft_s=1.0, tpot_s=0.1), attainment=0.9, copies=2.0, max_instances=6)


def answer(demand: Demand) -> Plan:
    found = plan(demand)
    wanted = demand.targets.attainment
    assert found.best is not None
    for trial in found.trials:
        assert trial.attained < wanted or trial.dollars_per_h >= found.best.dollars_per_h
        assert trial.attainments[-1] + trial.late_first + trial.slow_tokens == pytest.approx(1.0)
    return found


def dollars(copies: float, tpot_s: float = 0.1, model: str = "llama-3.1-8b") -> float:
    targets = replace(CHAT, copies=copies, slo=Slo(name="t", ttft_s=1.0, tpot_s=tpot_s))
    best = answer(trace_demand(ROWS, Hardware(model=model, gpus=("L40S", "H100")), targets)).best
    assert best is not None
    return best.dollars_per_h


def test_more_load_costs_no_less() -> None:
    light = dollars(0.5)
    assert light <= dollars(4.0)
    assert light == GPUS["L40S"].dollars_per_h, "one of the cheapest will do"


def test_a_target_below_what_the_cheap_gpu_can_needs_the_dear_one() -> None:
    cost = step_cost(GPUS["L40S"], MODELS["llama-3.1-8b"])
    assert dollars(0.5, tpot_s=0.8 * cost.step_s(1, 100, 100, 1)) > GPUS["L40S"].dollars_per_h


def test_a_model_too_large_for_one_gets_a_group() -> None:
    hardware = Hardware(model="llama-3.1-70b", gpus=("H100",))
    targets = replace(CHAT, slo=Slo(name="t", ttft_s=5.0, tpot_s=0.2), copies=0.2, max_instances=2)
    best = answer(trace_demand(ROWS, hardware, targets)).best
    assert best is not None
    assert best.parts[0].gpus_per_instance >= 2, "141 GB of weights on GPUs of 80 GB"
    with pytest.raises(ConfigError, match="fits no group"):
        trace_demand(ROWS, Hardware(model="llama-3.1-70b", gpus=()), targets)


def burst(at: float, count: int, num_prompt: int, num_output: int) -> list[TraceRow]:
    return [
        TraceRow(arrival_at=at + i / count, input_tokens=num_prompt, output_tokens=num_output)
        for i in range(count)
    ]


def test_the_windows_that_decide_are_those_with_most_prompts_and_most_decoding() -> None:
    rows = sorted(
        [
            *(TraceRow(arrival_at=float(i), input_tokens=50, output_tokens=2) for i in range(600)),
            *burst(100.0, 10, 9000, 2),
            *burst(400.0, 10, 50, 3000),
        ],
        key=lambda row: row.arrival_at,
    )
    loads = trace_demand(rows, Hardware(model="llama-3.1-8b", gpus=("H100",)), CHAT, seconds=40.0).loads
    at = {word: found for found in loads for word in ("prompts", "decoding", "all work") if word in found.why}
    assert at["prompts"].start_at <= 100.0 < at["prompts"].start_at + 40.0
    assert at["decoding"].start_at <= 400.0 < at["decoding"].start_at + 40.0
    assert at["all work"] is loads[0]
    assert all(
        len(found.columns) == sum(found.start_at <= row.arrival_at < found.start_at + 40.0 for row in rows)
        for found in loads
    )
    only = trace_demand(rows, Hardware(model="llama-3.1-8b"), CHAT, 200.0, 30.0).loads
    assert [(found.start_at, found.duration_s) for found in only] == [(200.0, 30.0)]


def test_what_comes_around_a_window_does_not_count() -> None:
    rows = [*burst(0.0, 200, 20_000, 2), *burst(500.0, 10, 50, 2)]
    hardware = Hardware(model="llama-3.1-8b", gpus=("H100",))
    calm = trace_demand(rows, hardware, CHAT, 450.0, 60.0)
    (instance,) = [one for one in hardware.instances(64) if one.gpus_per_instance == 1]
    trial = try_fleet((instance,), calm.loads, CHAT.slo, copies=1.0, wanted=0.9, effort=Effort())
    assert trial is not None
    assert trial.attained == 1.0
    busy = trace_demand(rows, hardware, CHAT, 0.0, 60.0)
    trial = try_fleet((instance,), busy.loads, CHAT.slo, copies=1.0, wanted=0.9, effort=Effort())
    assert trial is not None
    assert trial.attained < 0.9
    assert trial.limit == "time to first token"


def test_tokens_that_a_prompt_before_had_are_not_counted_as_new() -> None:
    rows = [
        TraceRow(
            arrival_at=float(i), input_tokens=1100, output_tokens=1, prefix_ids=ids, prefix_block_tokens=512
        )
        for i, ids in enumerate([(1, 2), (1, 3), (4, 2), (1, 2)])
    ]
    assert [*columns_of(rows).new] == [1100, 1100 - 512, 1100, 1100 - 1024]


def test_a_large_fleet_is_simulated_by_a_small_one_with_its_share_of_the_load() -> None:
    (one, *_) = Hardware(model="llama-3.1-8b", gpus=("H100",)).instances(64)
    assert stand_in((replace(one, num_both=5),)) == ((replace(one, num_both=5),), 1.0)
    (small,), share = stand_in((replace(one, num_both=30),))
    assert share == small.num_both / 30
    parts = (
        replace(one, num_both=0, num_prefill=10),
        replace(one, num_both=0, num_decode=30),
    )
    (prefill, decode), share = stand_in(parts)
    assert decode.num_decode == 3 * prefill.num_prefill
    assert share == decode.num_decode / 30


def test_a_part_of_a_load_is_as_steady_as_the_whole() -> None:
    """Ten copies of a burst are ten bursts, and so is a tenth of them; one copy would be one."""
    rows = burst(50.0, 200, 100, 1)
    (load,) = trace_demand(rows, Hardware(model="llama-3.1-8b"), CHAT, 0.0, 100.0).loads
    for copies, share, most in ((1.0, 1.0, 1.0), (10.0, 1.0, 0.4), (10.0, 0.1, 0.4)):
        times = [job.request.arrival_at for job in load.jobs(copies, CHAT.slo, share)]
        assert len(times) == pytest.approx(200 * copies * share, rel=0.2)
        fullest = max(sum(start <= at < start + 5 for at in times) for start in range(125))
        assert fullest <= most * len(times)


def test_the_answer_holds_its_headroom_and_no_more() -> None:
    demand = trace_demand(ROWS, Hardware(model="llama-3.1-8b", gpus=("L40S",)), CHAT)
    found = answer(demand)
    assert found.best is not None
    assert found.headroom is not None
    assert found.headroom.broken is not None

    def attained(times: float) -> float:
        assert found.best is not None
        trial = try_fleet(
            found.best.parts,
            demand.loads,
            CHAT.slo,
            copies=CHAT.copies * times,
            wanted=0.9,
            effort=Effort(),
        )
        assert trial is not None
        return trial.attained

    assert attained(found.headroom.held) >= 0.9 > attained(found.headroom.broken)
    held, broken = (f"{times:.3g}×" for times in (found.headroom.held, found.headroom.broken))
    assert f"holds {held} this load and not {broken}" in PlanFinding(demand, found).sentence


def test_what_no_fleet_could_serve_is_said_and_what_tokens_cost() -> None:
    long = [TraceRow(arrival_at=1.0 * i, input_tokens=200_000, output_tokens=5) for i in range(2)]
    rows = sorted([*ROWS, *long], key=lambda row: row.arrival_at)
    demand = trace_demand(rows, Hardware(model="llama-3.1-8b", gpus=("L40S",)), CHAT)
    found = plan(demand)
    assert found.hopeless_share == pytest.approx(2 / len(rows))
    sentence = PlanFinding(demand, found).sentence
    assert "no idle instance could serve" in sentence
    cost = PlanFinding(demand, found).dollars_per_million_tokens
    assert found.best is not None
    tokens = 2 * sum(row.input_tokens + row.output_tokens for row in rows)
    hours = (rows[-1].arrival_at - rows[0].arrival_at) / 3600
    assert cost == pytest.approx(found.best.dollars_per_h * hours / tokens * 1e6, rel=1e-6)


def test_fleets_of_two_kinds_of_gpus_are_considered_where_each_is_better_at_something() -> None:
    """Short requests are served for less by a cheap GPU; alone it is too slow for long prompts, and in groups no longer cheap."""
    short = [TraceRow(arrival_at=0.05 * i, input_tokens=100, output_tokens=40) for i in range(300)]
    long = [TraceRow(arrival_at=1.5 * i, input_tokens=12_000, output_tokens=5) for i in range(10)]
    rows = sorted([*short, *long], key=lambda row: row.arrival_at)
    hardware = Hardware(model="llama-3.1-8b", gpus=("L40S", "H100"))
    targets = replace(CHAT, slo=Slo(name="t", ttft_s=0.5, tpot_s=0.05))
    load = trace_demand(rows, hardware, targets).loads[0]
    all_kinds = kinds(hardware.instances(64), load.columns, targets.slo, 64)
    found = families(all_kinds, load, 0.99, 20.0, 64)
    both = [
        family for family in found if {part.kind.instance.gpu for part in family.parts} == {"L40S", "H100"}
    ]
    assert both
    scales = [rung.scale for rung in both[0].rungs]
    assert scales == sorted(scales)
    prices = [rung.dollars_per_h for rung in both[0].rungs]
    assert prices == sorted(prices)


@pytest.mark.slow
def test_a_fleet_of_two_kinds_computes_on_both() -> None:
    """A slow instance beside a fast one serves more than the fast one alone."""
    instances = Hardware(model="llama-3.1-8b", gpus=("L40S", "H100")).instances(64)
    slow, fast = (next(one for one in instances if one.gpu == gpu) for gpu in ("L40S", "H100"))
    load = trace_demand(ROWS, Hardware(model="llama-3.1-8b"), CHAT).loads
    slo = Slo(name="t", ttft_s=0.4, tpot_s=0.1)

    def attained(*parts: Fleet) -> float:
        trial = try_fleet(parts, load, slo, copies=8.0, wanted=0.0, effort=Effort())
        assert trial is not None
        return trial.attained

    both = attained(slow, fast)
    assert attained(fast) < both < attained(fast, replace(fast, num_both=2))
    assert attained(slow, fast) == both, "every run is the same"


def test_when_the_effort_is_spent_the_best_so_far_is_the_answer() -> None:
    demand = trace_demand(ROWS, Hardware(model="llama-3.1-8b"), CHAT)
    whole = plan(demand)
    assert not whole.num_left
    found = plan(demand, effort=Effort(0.02))
    assert found.best is not None
    assert found.num_left
    assert found.trials == whole.trials[: len(found.trials)], "it is the beginning of the same search"
    nothing = plan(demand, effort=Effort(0.001))
    assert (nothing.best, nothing.trials) == (None, ())
    assert f"{nothing.num_left} kinds of fleets were not searched" in PlanFinding(demand, nothing).sentence


def test_an_answer_is_the_same_on_a_machine_that_takes_an_hour_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, report = trace_of(tmp_path / "t.jsonl"), tmp_path / "r.json"
    command = ["plan", "--trace", str(trace), "--copies", "8", "--effort", "0.03", "--json", str(report)]

    def found() -> dict[str, Any]:
        ran = CliRunner().invoke(app, command)
        assert ran.exit_code == 0, ran.output
        return json.loads(report.read_text())

    soon, ticks = found(), count(0.0, 3600.0)
    assert soon["headroom"]["broken"] is None, "it was cut short"
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    late = found()
    assert late.pop("wall_s") >= 3600.0 > soon.pop("wall_s")
    assert late == soon


def test_sessions_are_planned_for_when_most_of_them_run(tmp_path: Path) -> None:
    turns: list[dict[str, object]] = [
        {"turn": i, "gap_ms": 500, "input_length": 2000 + 2000 * i, "output_length": 100} for i in range(6)
    ]
    sessions = replace(written(tmp_path / "own.jsonl", turns), start_within_s=8.0)
    many = replace(sessions, sessions=4 * [*sessions.sessions])
    targets = replace(CHAT, copies=1.0)
    demand = session_demand(many, Hardware(model="llama-3.1-8b", gpus=("H100",)), targets)
    assert [(found.start_at, found.duration_s) for found in demand.loads] == [(4.0, 4.0)]
    found = answer(demand)
    more = answer(replace(demand, targets=replace(targets, copies=16.0, max_instances=64)))
    assert found.best is not None
    assert more.best is not None
    assert more.best.dollars_per_h > found.best.dollars_per_h


def test_stages_divide_the_layers_and_wait_for_each_other_as_a_pipeline_does() -> None:
    gpu, model = GPUS["H100"], MODELS["llama-3.1-70b"]
    one, two = (step_cost(gpu, model, 4, pp) for pp in (1, 2))
    busy = (8192, 8192, 8192**2 / 2, 1)
    idle_share = 1 - (one.step_s(*busy) - one.overhead_s) / 2 / (two.step_s(*busy) - two.overhead_s)
    gpipe = (2 - 1) / (2 + 2 - 1)  # (stages - 1) / (micro-batches + stages - 1), Huang et al. 2019
    assert idle_share == pytest.approx(gpipe, abs=0.02)
    assert two.of_full_stages().step_s(*busy) < two.step_s(*busy)
    assert two.step_s(1, 100, 100, 1) > one.step_s(1, 100, 100, 1), "one token waits for every stage"


def test_where_reducing_is_dear_prompts_are_cheaper_in_stages() -> None:
    gpu, model, prompt = GPUS["L40S"], MODELS["llama-3.1-70b"], (8192, 8192, 8192**2 / 2, 1)
    assert step_cost(gpu, model, 4, 2).step_s(*prompt) < step_cost(gpu, model, 8).step_s(*prompt)


def trace_of(path: Path) -> Path:
    rows = [
        {"timestamp": 200 * i, "input_length": 300, "output_length": 9, "hash_ids": [0, i]} for i in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_command_plans_draws_and_says_when_it_cannot(tmp_path: Path) -> None:
    trace, report, picture = trace_of(tmp_path / "t.jsonl"), tmp_path / "r.json", tmp_path / "p.png"
    command = ["plan", "--trace", str(trace), "--gpus", "L40S", "--max-instances", "1", "--effort", "0"]
    ran = CliRunner().invoke(app, [*command, "--json", str(report), "--picture", str(picture)])
    assert ran.exit_code == 0, ran.output
    found = json.loads(report.read_text())
    assert found["best"]["name"] == "1 L40S any role"
    assert found["finding"].startswith("1 L40S any role at $0.76/h")
    assert found["headroom"]["held"] > 1
    assert image.imread(picture).std() > 0.05
    cheap = CliRunner().invoke(app, [*command, "--prices", "L40S=0.5", "--json", str(report)])
    assert cheap.exit_code == 0, cheap.output
    assert json.loads(report.read_text())["best"]["dollars_per_h"] == 0.5
    failed = CliRunner().invoke(app, [*command, "--tpot-ms", "0.001"])
    assert isinstance(failed.exception, ConfigError)
    assert "100.00% of the requests no idle instance could serve" in str(failed.exception)


@pytest.mark.parametrize("prices", ["L40S", "T4=1", "L40S=-1"])
def test_a_price_list_that_is_none_is_refused(tmp_path: Path, prices: str) -> None:
    trace = trace_of(tmp_path / "t.jsonl")
    ran = CliRunner().invoke(app, ["plan", "--trace", str(trace), "--prices", prices])
    assert "--prices" in str(ran.exception)


def test_the_command_plans_for_a_configuration_that_the_catalogue_does_not_have(tmp_path: Path) -> None:
    trace, report, model = tmp_path / "t.jsonl", tmp_path / "r.json", tmp_path / "config.json"
    rows = [{"timestamp": 200 * i, "input_length": 300, "output_length": 9} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    sizes = {"vocab_size": 129_280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128}
    latent = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    experts = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1}
    widths = {"v_head_dim": 128, "intermediate_size": 18_432, "moe_intermediate_size": 2048}
    content = sizes | latent | experts | widths | {"first_k_dense_replace": 3}
    command = ["plan", "--trace", str(trace), "--gpus", "H200", "--effort", "0"]
    command += ["--max-instances", "1", "--attainment", "0.9", "--json", str(report), "--model", str(model)]
    model.write_text(json.dumps(content))
    refused = CliRunner().invoke(app, command)
    assert "fits no group" in str(refused.exception), "671 billion weights of 16 bits on eight of 141 GB"
    model.write_text(json.dumps(content | {"quantization_config": {"quant_method": "fp8"}}))
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    assert json.loads(report.read_text())["best"]["name"] == "1 H200 tp8 any role"
    unknown = CliRunner().invoke(app, [*command[:-1], "mystery"])
    assert "mystery" in str(unknown.exception)
