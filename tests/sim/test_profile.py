"""The fit finds a known model through noise, its file is read strictly, and simulations take it."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from core.cost.step_profile import read_profile
from core.cost.steps import StepModel, StepModels
from core.errors import ConfigError
from sim.catalogue.device_profile import ProfiledCost, Sample, as_profile, cost_of, fit

MODEL = ProfiledCost(
    StepModels(
        StepModel(fixed_s=0.004, token_s=0.0, context_s=2e-6, seq_s=3e-4),
        StepModel(fixed_s=0.005, token_s=1e-4, context_s=0.0, seq_s=2e-4),
    ),
    prompt_pair_s=3e-8,
)


ROUTED = replace(
    MODEL,
    models=replace(
        MODEL.models, decode=replace(MODEL.models.decode, fixed_s=0.024, unread_s=0.02, unread_decay=0.03)
    ),
)


def samples(noise: float, model: ProfiledCost = MODEL) -> list[Sample]:
    rng, found = random.Random(1), list[Sample]()
    for _ in range(120):
        seqs = rng.randint(1, 32)
        count = rng.choice((0, rng.randint(8, 512)))
        context = seqs * rng.randint(10, 1000) + count
        num_pairs = float(context + count * rng.randint(1, 1000))
        duration_s = model.step_s(seqs + count, context, num_pairs, seqs) * rng.uniform(1 - noise, 1 + noise)
        found.append(
            Sample(
                num_tokens=seqs + count,
                context_tokens=context,
                num_pairs=num_pairs,
                num_seqs=seqs,
                duration_s=duration_s,
            )
        )
    return found


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.001), (0.1, 0.08)])
def test_a_known_step_time_model_is_found(noise: float, within: float) -> None:
    found = fit(samples(noise))
    for sample in samples(0.0):
        shape = (sample.num_tokens, sample.context_tokens, sample.num_pairs, sample.num_seqs)
        assert found.step_s(*shape) == pytest.approx(MODEL.step_s(*shape), rel=within)
    assert found.models.decode.error == pytest.approx(noise / 2, abs=0.03)
    parts = (found.models.decode, found.models.prompt)
    assert min(min(p.fixed_s, p.token_s, p.context_s, p.seq_s) for p in parts) >= 0


def test_what_reading_routed_experts_takes_is_found_and_written(tmp_path: Path) -> None:
    about = {"model": "m", "machine": "x", "num_blocks": 400, "kv_token_bytes": 6144, "num_layers": 6}
    path = tmp_path / "p.json"
    path.write_text(as_profile(fit(samples(0.0, ROUTED), 0.03), **about).model_dump_json())
    found = cost_of(read_profile(path))
    assert found.unread_decay == 0.03
    for seqs in (1, 8, 500):
        assert found.step_s(seqs, 10, 0.0, seqs) == pytest.approx(
            ROUTED.step_s(seqs, 10, 0.0, seqs), rel=0.01
        )


def test_the_file_is_read_strictly_and_simulated(tmp_path: Path) -> None:
    path, trace, report = tmp_path / "p.json", tmp_path / "t.jsonl", tmp_path / "r.json"
    about = {"model": "m", "machine": "x", "num_blocks": 400, "kv_token_bytes": 6144, "num_layers": 6}
    path.write_text(as_profile(fit(samples(0.0)), **about).model_dump_json())
    assert cost_of(read_profile(path)).models.decode.seq_s == pytest.approx(3e-4, rel=0.01)
    rows = [
        {"timestamp": 300 * i, "input_length": 100, "output_length": 9, "hash_ids": [0, i]} for i in range(6)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    for engine in ([], ["--coarse"]):
        ran = CliRunner().invoke(
            app, ["simulate", "--trace", str(trace), "--profile", str(path), "--json", str(report), *engine]
        )
        assert ran.exit_code == 0, ran.output
        figures = json.loads(report.read_text())
        assert figures["num_finished"] == 6
        assert 4.3 < figures["tpot_ms"]["p50"] < 9, (
            "a decode step's 4.3 ms and more, and the change-over after the first token"
        )
    path.write_text('{"decode": 1}')
    with pytest.raises(ConfigError, match="no profile"):
        read_profile(path)
