"""The fidelity study finds the pace and the front that were put in, and its floor and knee say what they should."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulator.fidelity import (
    SLO,
    Trip,
    figures,
    fitted,
    knee,
    lone_work,
    simulated,
    summary,
    together_work,
)
from core.cost.step_profile import Profile, ProfilePart
from sim.catalogue.cost import PacedCost
from sim.catalogued import Fleet, full_config

PART = ProfilePart(fixed_s=0.004, token_s=5e-5, context_s=1e-7, seq_s=1e-4, error=0.0, num_steps=100)
PROFILE = Profile(
    model="m",
    machine="x",
    decode=PART,
    prompt=PART,
    prompt_pair_s=0.0,
    num_blocks=500,
    kv_token_bytes=6144,
    num_layers=6,
)


def test_paces_and_front_are_found() -> None:
    """Requests of a machine that decodes half as fast and computes prompts at a third of the speed, behind a front of
    30 ms; each further stream adds 2 ms to a step."""
    fleet = Fleet(gpu="H100", model="llama-3.1-8b", num_prefill=0, num_decode=1, profile=PROFILE)
    config = full_config(fleet, SLO)
    slow = PacedCost(config.step, 2.0, 3.0, 0.002)
    assert slow.step_s(3, 100, 50.0, 3) == 2 * config.step.step_s(3, 100, 50.0, 3) + 2 * 0.002
    assert slow.step_s(10, 100, 50.0, 3) == 3 * config.step.step_s(10, 100, 50.0, 3) + 2 * 0.002
    seen = simulated(replace(config, step=slow), lone_work(0), 0.03)
    together = simulated(replace(config, step=slow), together_work(0), 0.03)
    paced, pace, front_s = fitted(fleet, seen, together)
    assert (pace.decode, pace.prompt) == (pytest.approx(2.0, rel=0.02), pytest.approx(3.0, rel=0.02))
    assert pace.stream_s == pytest.approx(0.002, rel=0.1)
    assert front_s == pytest.approx(0.03, abs=0.003)
    again = simulated(paced, lone_work(0), front_s)
    assert figures(again)["e2e_mean"] == pytest.approx(figures(seen)["e2e_mean"], rel=0.01)


def test_the_knee_is_interpolated() -> None:
    assert knee({1.0: 1.0, 2.0: 1.0, 4.0: 0.8}) == pytest.approx(3.0)
    assert knee({1.0: 1.0, 2.0: 0.95}) == 2.0
    assert knee({2.0: 0.0}) == pytest.approx(0.2)


def test_errors_are_medians_and_the_floor_takes_the_pace_out() -> None:
    def run(scale: float, error: float) -> dict[str, Any]:
        real = figures([Trip(0.1 * scale, 1.0 * scale, (0.02 * scale, 0.04 * scale))])
        guess = {name: value * (1 + error) for name, value in real.items()}
        return {"rate": 1.0, "pace": {"decode": scale, "prompt": scale}, "real": real, "simulated": guess}

    result = summary([run(1.0, 0.1), run(3.0, -0.3), run(2.0, 0.2)], [1.0])["by_rate"]["1"]["itl_mean"]
    assert result["error"] == pytest.approx(0.1)
    assert result["floor"] == pytest.approx(0.0)
    assert result["real_ms"] == pytest.approx(60.0)
