"""Bisection finds the knee, nobody beats the clairvoyant bound, and the summary counts what it says."""

from pathlib import Path

import pytest

from benchmarks.goodput_report import summarise
from core.types import Slo
from sim.baselines.table import SCHEDULERS
from sim.bound import bound_seconds
from sim.catalogue import GPUS, MODELS, step_cost
from sim.catalogued import MAX_NUM_SEQS, Fleet
from sim.coarse.workload import jobs
from sim.goodput import Curve, Window, attained, highest
from tests.sim.random_rows import random_rows

SLO = Slo("test", 0.5, 0.05)


@pytest.mark.parametrize("knee", [0.3, 1.0, 7.7])
def test_the_knee_is_found_from_either_side(knee: float) -> None:
    for guess in (knee / 5, knee * 4):
        found = highest(lambda copies: 1.0 if copies <= knee else 0.5, 0.9, guess)
        assert knee / 1.1 < found <= knee


def test_two_targets_share_their_runs() -> None:
    asked: list[float] = []

    def measure(copies: float) -> float:
        asked.append(copies)
        return 1.0 - copies / 10

    curve = Curve(measure)
    assert highest(curve, 0.9, 1.0) == pytest.approx(1.0, rel=0.08)
    assert highest(curve, 0.8, 1.0) == pytest.approx(2.0, rel=0.08)
    assert len(asked) == len(set(asked)) == len(curve.points)


def test_no_scheduler_beats_the_bound() -> None:
    """At twice the rate that the bound allows, misses are certain, even with the tail that a short window leaves."""
    part = Window(random_rows(2, 100, 20.0), 0.0, 4.0, 64)
    work = jobs(part.load(1.0, 0), SLO, 64)
    cost = step_cost(GPUS["L40S"], MODELS["llama-3.1-8b"])
    copies = part.duration_s / bound_seconds(work, cost, SLO, 64, MAX_NUM_SEQS, 0.9)
    fleet = Fleet("L40S", "llama-3.1-8b", 0, 0, 1)
    for name in ("sarathi", "baton"):
        assert attained(part, 2 * copies, 0, SLO, fleet, SCHEDULERS[name]) < 0.9
    assert attained(part, 0.1 * copies, 0, SLO, fleet, SCHEDULERS["sarathi"]) > 0.9


@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_that_was_cut_short_would_have_missed(seed: int) -> None:
    """Whether it is at least 90 % is never another answer, and what it then says is exact; below it is a bound."""
    part = Window(random_rows(seed, 400, 20.0), 0.0, 10.0, 64)
    fleet = Fleet("L40S", "llama-3.1-8b", 0, 0, 1)
    above = set[bool]()
    for copies in (0.8, 1.6, 2.4, 6.0):
        whole = attained(part, copies, seed, SLO, fleet, SCHEDULERS["sarathi"])
        cut = attained(part, copies, seed, SLO, fleet, SCHEDULERS["sarathi"], 0.9)
        assert cut == whole if whole >= 0.9 else whole <= cut < 0.9
        above.add(whole >= 0.9)
        if copies == 6.0:
            assert cut > whole, "it was not cut"
    assert above == {True, False}


def test_dearer_requests_are_given_up_first() -> None:
    part = Window(random_rows(3, 100, 10.0), 0.0, 1e9, 64)
    cost = step_cost(GPUS["H100"], MODELS["llama-3.1-8b"])
    work = jobs(part.load(1.0, 0), SLO, 64)
    whole, most = (bound_seconds(work, cost, SLO, 64, 256, share) for share in (1.0, 0.9))
    assert most < 0.9 * whole


def test_the_summary_compares_with_the_best_of_each_kind(tmp_path: Path) -> None:
    def cell(value: float) -> dict[str, dict[str, float]]:
        return {"goodput": {"0.9": value, "0.99": value}, "curve": {"1": 1.0, "2": 0.95, "3": 0.4}}

    cells = {}
    for where, factor in (("t/s/0", 1.0), ("t/s/1", 4.0)):
        values = dict.fromkeys(SCHEDULERS, 1.0) | {
            "baton": 3.0,
            "baton-split": 2.0,
            "dynamo": 1.5,
            "sarathi": 2.0,
        }
        for name, value in values.items():
            cells[f"{where}/{name}/1"] = cell(value * factor)
    bound = {f"t/s/{seed}/{target}": 6.0 for seed in (0, 1) for target in ("0.9", "0.99")}
    summary = summarise({"cells": cells, "bound": bound}, tmp_path / "picture.png")
    assert summary["0.9"]["best"] == {"static": "dynamo", "dynamic": "sarathi"}
    ours = summary["0.9"]["ours"]["baton"]
    assert (ours["ratio_to_best_static"], ours["ratio_to_best_dynamic"]) == (2.0, 1.5)
    assert ours["worst_cell_against_any"] == 1.5
    assert ours["share_of_bound"] == 1.0
    for name in ("picture.png", "picture_curves.png"):
        assert (tmp_path / name).stat().st_size > 5000
