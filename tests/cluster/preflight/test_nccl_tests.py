"""What is read from nccl-tests' output: a stand-in prints it in the form that its README shows."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.preflight.findings import Verdict
from cluster.preflight.nccl_tests import check_nccl_tests

OUTPUT = """\
#       size         count      type   redop    root     time   algbw   busbw #wrong
    67108864      16777216     float     sum      -1    512.3  131.00  229.25      0
# Out of bounds values : {wrong} {verdict}
# Avg bus bandwidth    : 229.25
"""


PROGRAMS = ("all_reduce_perf", "sendrecv_perf", "alltoall_perf")


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, programs: Sequence[str] = PROGRAMS
) -> None:
    for program in programs:
        (folder / program).write_text(f"#!/bin/sh\n{script}\n")
        (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def says(text: str) -> str:
    return f'echo "$@" > "$0.args"\ncat <<\'END\'\n{text}END'


def test_bandwidth_of_all_gpus_by_each_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, says(OUTPUT.format(wrong=0, verdict="OK")))
    findings = check_nccl_tests("n", 8)
    assert [finding.check for finding in findings] == list(PROGRAMS)
    for finding in findings:
        assert finding.verdict is Verdict.OK
        assert finding.measured.startswith("229.2 GB/s bus bandwidth over 8 GPUs")
        assert "-g 8" in (tmp_path / f"{finding.check}.args").read_text()


def test_wrong_values_and_failures_are_unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, says(OUTPUT.format(wrong=0, verdict="OK")))
    install(tmp_path, monkeypatch, says(OUTPUT.format(wrong=3, verdict="FAILED")), ["sendrecv_perf"])
    install(tmp_path, monkeypatch, "echo 'unhandled cuda error' >&2; exit 2", ["alltoall_perf"])
    sums, messages, swaps = check_nccl_tests("n", 2)
    assert sums.verdict is Verdict.OK
    assert (messages.verdict, messages.measured) == (Verdict.FAIL, "3 wrong values")
    assert (swaps.verdict, swaps.measured) == (Verdict.FAIL, "exit 2: unhandled cuda error")


def test_skipped_without_them_and_with_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [f.verdict for f in check_nccl_tests("n", 8)] == [Verdict.SKIP]
    install(tmp_path, monkeypatch, "exit 1")
    assert [f.verdict for f in check_nccl_tests("n", 1)] == [Verdict.SKIP]
