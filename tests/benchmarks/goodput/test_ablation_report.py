"""What an ablation's rows say, against figures that were worked out by hand and another bootstrap."""

import random
from statistics import fmean
from typing import Any

import pytest

from benchmarks.goodput.ablation_report import LEAST_LOADS, effect_of, report, rule_table, verdict
from benchmarks.goodput.ablation_runs import FULL, packed, unpacked
from benchmarks.goodput.rules import RULES


def row(
    load: str, variant: str, gained: int, lost: int, count: int = 1000, arrivals: int = 0
) -> dict[str, Any]:
    groups = {"all": {"requests": count, "in_time": 900 + gained - lost, "gained": gained, "lost": lost}}
    return {"load": load, "variant": variant, "arrivals": arrivals, "groups": groups, "decisions": variant}


def test_loads_weigh_alike_whatever_their_requests_and_arrivals() -> None:
    rows = [row("a", "v", 0, 20), row("a", "v", 0, 40, arrivals=1), row("b", "v", 1, 0, count=100)]
    effect = effect_of(rows, "all", sign=-1)
    assert effect is not None
    assert effect.by_load == pytest.approx({"a": 3.0, "b": -1.0})
    assert (effect.mean, effect.worst[0], effect.best[0]) == (pytest.approx(1.0), "b", "a")


def test_the_interval_is_that_of_requests_drawn_again() -> None:
    effect = effect_of([row("a", "v", 10, 40)], "all", sign=-1)
    assert effect is not None
    rng, whole = random.Random(1), [-1] * 10 + [1] * 40 + [0] * 950
    means = sorted(100 * fmean(rng.choices(whole, k=1000)) for _ in range(2000))
    assert (effect.low, effect.high) == pytest.approx((means[50], means[1950]), abs=0.25)


def test_what_nobody_ran_says_nothing() -> None:
    assert effect_of([], "all", sign=1) is None
    assert effect_of([row("a", "v", 1, 0)], "light", sign=1) is None


@pytest.mark.parametrize(
    ("mean", "own", "said"),
    [
        ((0, 40), None, "stays"),
        ((0, 0), (0, 100), "stays"),
        ((0, 0), (0, 0), "goes"),
        ((0, 0), None, "open: its own case was not run"),
        ((20, 22), (0, 8), "open"),
    ],
)
def test_a_rule_stays_by_its_mean_or_its_own_case_and_is_open_while_that_is_unsure(
    mean: tuple[int, int], own: tuple[int, int] | None, said: str
) -> None:
    of_all = effect_of([row(f"a {number}", "v", *mean) for number in range(LEAST_LOADS)], "all", sign=-1)
    of_own = effect_of([row("a", "v", *own)], "all", sign=-1) if own else None
    assert of_all is not None
    assert verdict(of_all, of_own) == said


def test_of_few_loads_nothing_is_concluded() -> None:
    alone = effect_of([row("a", "v", 0, 400)], "all", sign=-1)
    assert alone is not None
    assert verdict(alone, alone) == "open: few loads"


def test_a_line_names_the_rule_its_own_case_and_runs_that_decided_alike() -> None:
    rule = next(rule for rule in RULES if rule.name == "risk")
    name = f"without {rule.name}"
    same = row("bursts b", name, 0, 0) | {"decisions": FULL}
    rows = [row("sustained a|base", name, 0, 50), same, row("bursts b", FULL, 0, 0)]
    line = rule_table(rows)[-1]
    assert line.startswith("| risk (029) | +2.50 (")
    assert "+0.0, bursts b | +5.0, sustained a, base |" in line
    assert "sustained: +5.00 (" in line
    assert "| 1 of 2 | open: few loads |" in line
    assert line in report(rows)


def test_who_was_in_time_is_kept_in_a_few_characters() -> None:
    rng = random.Random(2)
    for count in (1, 7, 8, 9, 1000):
        held = [rng.random() < 0.9 for _ in range(count)]
        assert [*unpacked(packed(held), count)] == held
    assert len(packed([True] * 1000)) < 180
