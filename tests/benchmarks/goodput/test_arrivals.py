"""What `benchmarks.goodput arrivals` says of shares at one rate, and which runs it makes."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.goodput.arrivals import MISSES, PLACES, by_name, main, run, shares, summary
from core.types import Request, SamplingParams, Slo
from sim.coarse.simulated_sequence import SimulatedRequest
from tests.benchmarks.small_traces import write_traces

TIMED = Slo(ttft_s=2.0, tpot_s=0.1)


def shares_of(**by_arrivals: float) -> dict[str, dict[str, float]]:
    return {seed.removeprefix("_"): {"share": share} for seed, share in by_arrivals.items()}


def test_others_are_compared_on_the_same_arrivals() -> None:
    found = summary({
        "baton": shares_of(_0=0.9, _1=0.8, _2=1.0),
        "sarathi": shares_of(_0=0.8, _1=0.8),
        "mooncake": shares_of(_7=0.5),
    })  # fmt: skip
    assert found["baton"] == {"mean": 0.9, "deviation": 0.1}
    assert found["sarathi"] == {"mean": 0.8, "deviation": 0.0, "ahead": 0.05, "ahead_error": 0.05}
    assert found["mooncake"] == {"mean": 0.5, "deviation": 0.0}


def test_what_shares_are_made_of_is_averaged_where_all_runs_say_it() -> None:
    runs = {"0": {"share": 0.9, "late": 0.1, "slow": 0.0}, "1": {"share": 0.7, "late": 0.3}}
    assert summary({"baton": runs})["baton"]["made of"] == {"late": 0.2}


def test_a_name_counts_the_places_that_are_behind_by_more_than_two_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PLACES, "both", ("a|base|1", "b|base|1", "c|base|1"))
    ours = shares_of(_0=0.9, _1=0.9)
    places = {
        "a|base|1": summary(
            {"baton": ours, "x": shares_of(_0=0.93, _1=0.94), "y": shares_of(_0=0.7, _1=0.7)}
        ),
        "b|base|1": summary({"baton": ours, "x": shares_of(_0=0.8, _1=0.99)}),
    }
    found = by_name(places)["both"]
    assert found == {"ahead": pytest.approx(-0.015), "worst": -0.035, "behind": 1, "places": 2}


def test_a_request_in_time_is_none_of_those_that_missed() -> None:
    slow, late, refused, timely = (
        job(name, tenant="heavy") for name in ("slow", "late", "refused", "timely")
    )
    light = job("light", tenant="light")
    for one in (slow, timely, light):
        one.first_at, one.last_at, one.num_output = 0.5, 1.0, 11
    slow.last_at = 5.0
    late.first_at, late.last_at, late.num_output = 3.0, 3.5, 11
    refused.rejected = "busy"
    assert shares([slow, late, refused, timely, light]) == {
        "share": 0.4,
        "late": 0.2,
        "slow": 0.2,
        "refused": 0.2,
        "share of light tenants": 1.0,
    }


def test_classes_have_shares_of_their_own_though_some_gave_way() -> None:
    chat, batch = replace(TIMED, name="chat"), replace(TIMED, name="batch")
    made = [job("a", slo=chat), job("b", slo=chat.giving_way()), job("c", slo=batch)]
    for one in made[1:]:
        one.first_at, one.last_at, one.num_output = 0.5, 1.0, 11
    found = shares(made)
    assert (found["share of chat"], found["share of batch"]) == (0.5, 1.0)


def job(name: str, *, slo: Slo = TIMED, tenant: str = "") -> SimulatedRequest:
    request = Request(
        id=name,
        prompt=(),
        sampling=SamplingParams(max_tokens=11),
        reply_to="",
        slo=slo,
        arrival_at=0.0,
        tenant=tenant,
    )
    return SimulatedRequest(request=request, ids=(1,), hashes=(), num_prompt=1)


@pytest.mark.parametrize(
    "place", ["agents/interactive/0|base|1.5 copies", "deepseek-r1+tenants/mixed/0|base|2"]
)
def test_sessions_and_tenants_are_served(place: str, tmp_path: Path) -> None:
    write_traces(tmp_path)
    found = run(tmp_path, place, "baton", 1)
    assert 0 < found["share"] <= 1
    assert sum(found[miss] for miss in MISSES) == pytest.approx(1 - found["share"], abs=3e-4)
    assert ("share of light tenants" in found) == ("tenants" in place)


def test_runs_of_the_same_code_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_traces(tmp_path)
    out, place = tmp_path / "out.json", "azure-code/mixed/0|base|2"

    def runs(arrivals: int) -> dict[str, Any]:
        words = ["--at", place, "--schedulers", "sarathi", "--arrivals", str(arrivals), "--json", str(out)]
        monkeypatch.setattr(sys, "argv", ["arrivals", "--traces", str(tmp_path), *words])
        main()
        return json.loads(out.read_text())["runs"]

    first = runs(1)
    assert 0 <= first[f"{place}|sarathi|0"]["share"] <= 1
    first[f"{place}|sarathi|0"]["share"] = 0.123
    out.write_text(json.dumps({"runs": first}))
    both = runs(2)
    assert both[f"{place}|sarathi|0"]["share"] == 0.123
    other = both[f"{place}|sarathi|1"]
    out.write_text(json.dumps({"runs": {f"{place}|sarathi|1": {**other, "share": 0.123, "code": "other"}}}))
    assert runs(2)[f"{place}|sarathi|1"] == other
