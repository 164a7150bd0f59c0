"""The plan holds its targets, nothing cheaper that was tried does, and more load or tighter targets never cost less."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from core.errors import ConfigError
from core.types import Slo
from sim.catalogue import GPUS, MODELS, step_cost
from sim.goodput import Window
from sim.planner import Demand, cheapest, plan
from tests.sim.random_rows import random_rows

WINDOW = Window(random_rows(4, 60, 20.0), 0.0, 3.0, 64)


def dollars(copies: float, tpot_s: float = 0.1, model: str = "llama-3.1-8b") -> float:
    demand = Demand(
        model=model,
        window=WINDOW,
        slo=Slo(name="t", ttft_s=1.0, tpot_s=tpot_s),
        attainment=0.9,
        seeds=(0,),
        copies=copies,
        gpus=("L40S", "H100"),
        max_instances=6,
    )
    trials = plan(demand)
    best = cheapest(trials, 0.9)
    assert best is not None
    for trial in trials:
        assert trial.mean < 0.9 or trial.fleet.dollars_per_h >= best.fleet.dollars_per_h
        assert trial.mean + trial.late_first + trial.slow_tokens == pytest.approx(1.0)
    return best.fleet.dollars_per_h


def test_more_load_costs_no_less() -> None:
    light = dollars(0.5)
    assert light <= dollars(2.0)
    assert light == GPUS["L40S"].dollars_per_h, "one of the cheapest will do"


def test_a_target_below_what_the_cheap_gpu_can_needs_the_dear_one() -> None:
    cost = step_cost(GPUS["L40S"], MODELS["llama-3.1-8b"])
    assert dollars(0.5, tpot_s=0.8 * cost.step_s(1, 100, 100, 1)) > GPUS["L40S"].dollars_per_h


def test_a_model_too_large_for_one_gets_a_group() -> None:
    demand = Demand(
        model="llama-3.1-70b",
        window=WINDOW,
        slo=Slo(name="t", ttft_s=5.0, tpot_s=0.2),
        attainment=0.9,
        seeds=(0,),
        copies=0.2,
        gpus=("H100",),
        max_instances=2,
    )
    best = cheapest(plan(demand), 0.9)
    assert best is not None
    assert best.fleet.gpus_per_instance >= 2, "141 GB of weights on GPUs of 80 GB"
    with pytest.raises(ConfigError, match="fits no group"):
        plan(
            Demand(
                model="llama-3.1-70b",
                window=WINDOW,
                slo=Slo(),
                attainment=0.9,
                seeds=(0,),
                copies=1.0,
                gpus=(),
                max_instances=2,
            )
        )


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


def test_the_command_plans_draws_and_says_when_it_cannot(tmp_path: Path) -> None:
    trace, report, picture = tmp_path / "t.jsonl", tmp_path / "r.json", tmp_path / "p.png"
    rows = [
        {"timestamp": 200 * i, "input_length": 300, "output_length": 9, "hash_ids": [0, i]} for i in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    command = [
        "plan",
        "--trace",
        str(trace),
        "--seconds",
        "4",
        "--gpus",
        "L40S",
        "--seeds",
        "2",
        "--max-instances",
        "1",
    ]
    ran = CliRunner().invoke(app, [*command, "--json", str(report), "--plot", str(picture)])
    assert ran.exit_code == 0, ran.output
    best = json.loads(report.read_text())["best"]
    assert best["name"] == "L40S: 1 any role"
    assert len(best["attainments"]) == 2
    assert picture.stat().st_size > 5000
    failed = CliRunner().invoke(app, [*command, "--tpot-ms", "0.001"])
    assert isinstance(failed.exception, ConfigError)


def test_the_command_plans_for_a_configuration_that_the_catalogue_does_not_have(tmp_path: Path) -> None:
    trace, report, model = tmp_path / "t.jsonl", tmp_path / "r.json", tmp_path / "config.json"
    rows = [{"timestamp": 200 * i, "input_length": 300, "output_length": 9} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    sizes = {"vocab_size": 129_280, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128}
    latent = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    experts = {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1}
    widths = {"v_head_dim": 128, "intermediate_size": 18_432, "moe_intermediate_size": 2048}
    content = sizes | latent | experts | widths | {"first_k_dense_replace": 3}
    command = ["plan", "--trace", str(trace), "--seconds", "4", "--gpus", "H200", "--seeds", "1"]
    command += ["--max-instances", "1", "--attainment", "0.9", "--json", str(report), "--model", str(model)]
    model.write_text(json.dumps(content))
    refused = CliRunner().invoke(app, command)
    assert "fits no group" in str(refused.exception), "671 billion weights of 16 bits on eight of 141 GB"
    model.write_text(json.dumps(content | {"quantization_config": {"quant_method": "fp8"}}))
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    assert json.loads(report.read_text())["best"]["name"] == "H200 tp8: 1 any role"
    unknown = CliRunner().invoke(app, [*command[:-1], "mystery"])
    assert "mystery" in str(unknown.exception)
