"""What is read from nccl-tests' output: a stand-in prints it in the form that its README shows."""

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


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    binary = folder / "all_reduce_perf"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def says(text: str) -> str:
    return f'echo "$@" > "$0.args"\ncat <<\'END\'\n{text}END'


def test_bandwidth_of_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, says(OUTPUT.format(wrong=0, verdict="OK")))
    finding = check_nccl_tests("n", 8)
    assert (finding.verdict, finding.measured) == (Verdict.OK, "229.2 GB/s bus bandwidth over 8 GPUs")
    assert "-g 8" in (tmp_path / "all_reduce_perf.args").read_text()


def test_wrong_values_and_failures_are_unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, says(OUTPUT.format(wrong=3, verdict="FAILED")))
    assert check_nccl_tests("n", 2).verdict is Verdict.FAIL
    install(tmp_path, monkeypatch, "echo 'unhandled cuda error' >&2; exit 2")
    finding = check_nccl_tests("n", 2)
    assert (finding.verdict, finding.measured) == (Verdict.FAIL, "exit 2: unhandled cuda error")


def test_skipped_without_them_and_with_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_nccl_tests("n", 8).verdict is Verdict.SKIP
    install(tmp_path, monkeypatch, "exit 1")
    assert check_nccl_tests("n", 1).verdict is Verdict.SKIP
