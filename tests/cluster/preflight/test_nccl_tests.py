"""What is read from nccl-tests' output, within a node and over nodes."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.preflight.findings import Verdict
from cluster.preflight.local_node import LocalNode
from cluster.preflight.nccl_tests import measure_node, measure_over_nodes, rounds
from core.errors import ConfigError
from tests.cluster.preflight.stand_ins import OUTPUT, PROGRAMS, needs_mpich, put_mpi, put_scripts, says
from tests.processes import in_use

FINE = OUTPUT.format(gb_per_s=229.25, wrong=0, verdict="OK")


async def test_bandwidth_of_all_gpus_by_each_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_scripts(tmp_path, monkeypatch, says(FINE))
    tests = await measure_node("n", 8)
    assert [finding.check for finding in tests.findings] == list(PROGRAMS)
    assert tests.sendrecv_bytes_per_s == 229.25e9
    for finding in tests.findings:
        assert finding.verdict is Verdict.OK
        assert finding.measured.startswith("229.2 GB/s bus bandwidth over 8 GPUs")
        assert "-g 8" in (tmp_path / f"{finding.check}.args").read_text()


async def test_wrong_values_and_failures_are_unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_scripts(tmp_path, monkeypatch, says(FINE))
    wrong = OUTPUT.format(gb_per_s=229.25, wrong=3, verdict="FAILED")
    put_scripts(tmp_path, monkeypatch, says(wrong), ["sendrecv_perf"])
    put_scripts(tmp_path, monkeypatch, "echo 'unhandled cuda error' >&2; exit 2", ["alltoall_perf"])
    tests = await measure_node("n", 2)
    sums, messages, swaps = tests.findings
    assert sums.verdict is Verdict.OK
    assert (messages.verdict, messages.measured) == (Verdict.FAIL, "3 wrong values")
    assert (swaps.verdict, swaps.measured) == (Verdict.FAIL, "exit 2: unhandled cuda error")
    assert tests.sendrecv_bytes_per_s == 0


async def test_skipped_without_them_and_with_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [f.verdict for f in (await measure_node("n", 8)).findings] == [Verdict.SKIP]
    put_scripts(tmp_path, monkeypatch, "exit 1")
    assert [f.verdict for f in (await measure_node("n", 1)).findings] == [Verdict.SKIP]


def nodes(*names: str) -> list[LocalNode]:
    return [LocalNode(name) for name in names]


@needs_mpich
async def test_collectives_over_all_nodes_and_messages_between_each_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_mpi(tmp_path, monkeypatch, 48.5)
    found = await measure_over_nodes(nodes("a", "b", "c"), 8, "127.0.0.1", 0)
    assert {(f.where, f.check, f.verdict) for f in found.findings} == {
        ("all nodes", "all_reduce_perf", Verdict.OK),
        ("all nodes", "alltoall_perf", Verdict.OK),
        ("a - b", "sendrecv_perf", Verdict.OK),
        ("a - c", "sendrecv_perf", Verdict.OK),
        ("b - c", "sendrecv_perf", Verdict.OK),
    }
    assert "48.5 GB/s bus bandwidth over 3 nodes of 8 GPUs" in found.findings[0].measured
    assert found.by == "sendrecv_perf"
    assert found.bytes_per_s == {(a, b): 48.5e9 for a in range(3) for b in range(3) if a != b}
    args = {program: (tmp_path / f"{program}.args").read_text().splitlines() for program in PROGRAMS}
    assert [len(args[program]) for program in PROGRAMS] == [3, 6, 3]
    assert all("-g 8" in line for line in args["all_reduce_perf"])
    assert all("-g 1" in line for line in args["sendrecv_perf"])


@pytest.fixture
def swept() -> Iterator[None]:
    """Remove what MPICH's programs that are killed leave in /dev/shm (docs/adr/099), but not what those of other tests have there."""
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    yield
    for path in set(Path("/dev/shm").glob("mpich_shm_*")) - before:
        if not in_use(path):
            path.unlink(missing_ok=True)


@needs_mpich
@pytest.mark.slow
@pytest.mark.usefixtures("swept")
async def test_a_pair_that_fails_is_named_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(LocalNode):
        async def run_proxy(self, options: Sequence[str], deadline_s: float) -> None:
            raise ConfigError("no route to host")

    put_mpi(tmp_path, monkeypatch, 48.5)
    found = await measure_over_nodes([*nodes("a", "b"), Cut("c")], 1, "127.0.0.1", 100e9)
    failed = {f.where: f.measured for f in found.findings if f.verdict is Verdict.FAIL}
    assert set(failed) == {"all nodes", "a - c", "b - c", "a - b"}
    assert failed["a - c"] == "no route to host"
    assert "48.50 GB/s" in failed["a - b"]  # less than what was expected
    assert set(found.bytes_per_s) == {(0, 1), (1, 0)}


@needs_mpich
async def test_programs_that_know_no_mpi_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_scripts(tmp_path, monkeypatch, says(FINE))
    found = await measure_over_nodes(nodes("a", "b"), 1, "127.0.0.1", 0)
    assert not found.bytes_per_s
    assert all("built without MPI=1" in finding.measured for finding in found.findings)


@given(st.integers(2, 40))
def test_each_two_nodes_meet_once_and_no_node_is_in_two_pairs_at_once(num_nodes: int) -> None:
    made = rounds(num_nodes)
    assert sorted(pair for pairs in made for pair in pairs) == list(combinations(range(num_nodes), 2))
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in made)
    assert len(made) == num_nodes - 1 + num_nodes % 2
