"""The command of the ablation: it goes on where it stopped, in an order that says most first, and each rule can be switched off."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.goodput import ablate
from benchmarks.goodput.ablate import Rows, batches, chosen, missing
from benchmarks.goodput.ablation_loads import BY_KIND, FLOOD_S, AblationLoad, in_turn
from benchmarks.goodput.ablation_runs import FULL, Task, constants, run, variants
from benchmarks.goodput.devices import DEVICES
from benchmarks.goodput.rules import RULES
from tests.benchmarks.small_traces import write_traces

SMALL = AblationLoad("sustained", "azure-chat/interactive/0|base|baton", 2.0)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    write_traces(tmp_path)
    return tmp_path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablate, "in_turn", lambda _: [SMALL])
    monkeypatch.setattr(ablate, "find_knee", lambda *_: {"rate": 2.0, "share": 1.0})


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["ablate", *map(str, words)])
    ablate.main()


def test_the_loads_are_as_many_as_the_study_names() -> None:
    lasting = [*BY_KIND["sustained"], *BY_KIND["host"]]
    assert len(lasting) == 24
    assert all(float(load.place.split("|")[0].split("/")[3]) >= 180 for load in lasting)
    assert len({load.place.split("|")[1] for load in lasting}) == 10
    assert len(BY_KIND["bursts"]) == 28
    loads = in_turn([*BY_KIND])
    assert len({load.name for load in loads}) == len(loads)
    assert {load.place.split("|")[1] for load in loads} <= set(DEVICES)
    assert {rule.case for rule in RULES} <= set(BY_KIND)


def test_loads_come_one_of_each_kind_at_first() -> None:
    kinds = [load.kind for load in in_turn([*BY_KIND])]
    assert set(kinds[: len(BY_KIND)]) == set(BY_KIND)


def test_every_rule_comes_on_every_load_before_more_arrivals_and_constants() -> None:
    loads, names = in_turn(["pools", "links"]), chosen([], with_constants=True)
    found = [*batches(loads, 2, names)]
    assert [(load, arrivals) for load, arrivals, of in found if of == names[0]] == [
        (load, arrivals) for arrivals in (0, 1) for load in loads
    ]
    assert [of for _, _, of in found] == [names[0]] * 10 + [names[1]] * 10


def test_a_name_stands_for_a_rule_a_constant_or_one_variant_of_it() -> None:
    assert chosen(["risk", "delay_weight"], with_constants=True) == (
        ["without risk"],
        ["half delay_weight", "double delay_weight"],
    )
    assert chosen(["half delay_weight"], with_constants=False)[1] == ["half delay_weight"]
    with pytest.raises(ValueError, match="unknown: nothing"):
        chosen(["nothing"], with_constants=True)


def test_variants_stay_within_the_ranges_of_their_constants() -> None:
    assert len(RULES) + len(constants()) < len(variants()) <= 1 + len(RULES) + 2 * len(constants())
    assert variants()["double tpot_margin"] == {"tpot_margin": 1.0}


def test_the_full_law_decides_as_it_does_without_any_tuning(traces: Path) -> None:
    first, second = (run(Task(traces, SMALL, 2.0, FULL, 0, None)) for _ in range(2))
    assert first["decisions"] == second["decisions"]
    same = run(Task(traces, SMALL, 2.0, "without fetched prefixes", 0, first["in_time"]))
    assert same["decisions"] == first["decisions"], "nothing is fetched where every instance computes prompts"
    assert same["groups"]["all"] == first["groups"]["all"] | {"gained": 0, "lost": 0}


def test_after_an_overload_only_what_comes_later_counts(traces: Path) -> None:
    load = AblationLoad("overload", "azure-chat/interactive/0/60|base|baton", 2.0)
    work = load.work(load.cell(traces), 2.0, 0)
    early = [job for job in work if job.request.arrival_at < FLOOD_S]
    assert len(early) == pytest.approx(2 * (len(work) - len(early)), rel=0.3)
    assert len(load.counted(work)) == len(work) - len(early)


@pytest.mark.usefixtures("small")
def test_it_goes_on_where_it_stopped(
    traces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = traces / "rows.jsonl"
    words = ["--traces", traces, "--json", path, "--seeds", 1, "--only", "risk", "late binding"]
    command(monkeypatch, *words, "--budget", 0)
    assert len(path.read_text().splitlines()) == 1, "no time: nothing but what made it"
    command(monkeypatch, *words)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["variant"] for line in lines[2:]] == [FULL, "without risk", "without late binding"]
    assert lines[1].keys() == {"load", "rate", "share"}
    assert not missing(Rows(path), [(SMALL, 0, ["without risk", "without late binding"])])
    before = path.read_text()
    command(monkeypatch, *words)
    assert path.read_text() == before
    assert "0 runs are left" in capsys.readouterr().out
    command(monkeypatch, "--json", path, "--report")
    assert "| risk (029) |" in capsys.readouterr().out


def test_runs_of_other_code_are_made_again(traces: Path) -> None:
    path = traces / "rows.jsonl"
    rows = Rows(path)
    row = run(Task(traces, SMALL, 2.0, FULL, 0, None))
    rows.add(row)
    rows.add(row | {"code": "other", "arrivals": 1})
    rows.add(row | {"variant": "without risk", "changed": {"risk_weight": "1.0"}})
    again = Rows(path)
    assert [*again.runs] == [(SMALL.name, FULL, 0)]
    assert again.num_others == 2
    assert missing(again, [(SMALL, arrivals, ["without risk"]) for arrivals in (0, 1)]) == [SMALL.name] * 3
