"""What benchmarks/gpu/kernels.py makes of timings, without a GPU."""

import itertools

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from benchmarks.gpu import kernels
from benchmarks.gpu.cases import Case
from benchmarks.gpu.limits import Limits

LIMITS = Limits(copy_bytes_per_s=1e12, flops={"bfloat16": 1e15, "int8": 2e15})


def test_a_floor_is_the_slower_of_what_must_be_moved_and_computed() -> None:
    assert LIMITS.floor_s(2e9, 0, "bfloat16") == pytest.approx(2e-3)
    assert LIMITS.floor_s(2e9, 4e12, "bfloat16") == pytest.approx(4e-3)
    assert LIMITS.floor_s(0, 4e12, "int8") == pytest.approx(2e-3)
    assert LIMITS.floor_s(1e9, 4e12, "float8") == pytest.approx(1e-3)  # a rate that this GPU does not have


@pytest.mark.parametrize(
    ("case", "of_floor", "met"),
    [
        (Case(name="near", run=lambda: 1.25e-3, num_bytes=1e9, target=0.75), 0.8, True),
        (Case(name="far", run=lambda: 2e-3, num_bytes=1e9, target=0.75), 0.5, False),
        (Case(name="nobody asks", run=lambda: 2e-3, num_bytes=1e9), 0.5, None),
        (Case(name="as the peer", run=lambda: 2e-3, num_bytes=1e9, target=0.8, against=True, peers={"a": lambda: 1.7e-3, "b": lambda: 3.0}), 0.5, True),
        (Case(name="behind the faster peer", run=lambda: 2e-3, num_bytes=1e9, target=0.8, against=True, peers={"a": lambda: 1e-3, "b": lambda: 3.0}), 0.5, False),
    ],
)  # fmt: skip
def test_targets(case: Case, of_floor: float, met: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case's `run` here is how long it takes."""
    monkeypatch.setattr(kernels, "seconds", lambda run: run())
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    row = kernels.run_case(case, LIMITS)
    assert row["of_floor"] == pytest.approx(of_floor)
    assert row["met"] is met
    shown = kernels.show(row)
    assert case.name in shown
    assert ("met" in shown) == (met is True)
    assert ("missed" in shown) == (met is False)


def test_no_case_is_begun_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "seconds", lambda run: run())
    cases = [Case(name=str(i), run=lambda: 1e-3, num_bytes=1e6) for i in range(9)]
    ticks = itertools.count(0, 100)
    rows, left_out = kernels.run_all(cases, LIMITS, 450, now=lambda: float(next(ticks)))
    assert [row["name"] for row in rows] == ["0", "1", "2", "3"]
    assert left_out == "4"
    rows, left_out = kernels.run_all(cases, LIMITS, 450, now=lambda: 0.0)
    assert (len(rows), left_out) == (9, "")
