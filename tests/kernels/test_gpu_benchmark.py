"""What benchmarks/gpu/kernels.py makes of timings, without a GPU."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from benchmarks.gpu import kernels, session
from benchmarks.gpu.__main__ import AGAIN
from benchmarks.gpu.cases import Case
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.session import Results

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
    row = kernels.run_case(case, LIMITS)
    assert row["of_floor"] == pytest.approx(of_floor)
    assert [one.met for one in kernels.verdicts({case.name: row})] == ([] if met is None else [met])


class Broken(RuntimeError):
    pass


def failing() -> float:
    raise Broken("no such instruction")


def results(path: Path) -> Results:
    return Results(path, "benchmarks.gpu.kernels", torch.device("cpu"), kernels.verdicts)


def test_a_kernel_that_fails_hides_no_other_and_is_tried_again_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kernels, session):
        monkeypatch.setattr(module, "INTERPRETED", True)
    tried = list[str]()

    def seconds(run: Callable[[], float]) -> float:
        return run()

    monkeypatch.setattr(kernels, "seconds", seconds)

    def case(name: str, run: Callable[[], float]) -> Case:
        return Case(name=name, run=lambda: tried.append(name) or run(), num_bytes=1e6, target=0.5)

    def cannot_be_made() -> Iterator[Case]:
        yield case("of the second group", lambda: 1e-3)
        raise Broken("no memory")

    groups: dict[str, kernels.Make] = {
        "one": lambda: [case("bad", failing), case("good", lambda: 1e-6)],
        "two": cannot_be_made,
        "three": lambda: [case("last", lambda: 1e-6)],
    }
    file = tmp_path / "kernels.json"
    first = results(file)
    kernels.run_all(groups, LIMITS, first)
    assert set(first.rows) == {"good", "of the second group", "last"}
    assert first.failed == {"bad": "Broken: no such instruction", "making two": "Broken: no memory"}
    with pytest.raises(SystemExit, match="failed: bad, making two"):
        first.end()
    assert not json.loads(file.read_text())["complete"]
    tried.clear()
    groups["two"] = lambda: [case("of the second group", failing), case("new", lambda: 1e-6)]
    again = results(file)
    kernels.run_all(groups, LIMITS, again)
    assert tried == ["new", "bad"], "what is there is not made again, and what has failed comes last"
    assert set(again.failed) == {"bad"}


def test_a_process_that_ends_in_a_row_is_told_by_the_next_which_begins_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "INTERPRETED", True)
    file = tmp_path / "rows.json"

    def killed() -> session.Row:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        results(file).make("first", killed)
    after = results(file)
    assert after.failed == {"first": "the process has ended in it"}
    assert after.missing(["first", "second"]) == ["second", "first"]
    assert after.make("first", lambda: {"reached": 1.0})
    after.end()
    assert json.loads(file.read_text())["complete"]


def test_a_device_that_an_error_has_taken_ends_the_process_for_another_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", failing)
    with pytest.raises(SystemExit) as end:
        results(tmp_path / "rows.json").make("bad", failing)  # type: ignore[arg-type]
    assert end.value.code == session.AGAIN == AGAIN
    assert results(tmp_path / "rows.json").failed == {"bad": "Broken: no such instruction"}
