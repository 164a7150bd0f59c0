"""Runs tests/kernels/triton in Triton's interpreter: chosen when triton is imported, so in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_interpreted(name: str) -> None:
    _interpret("pytest", "-x", "--timeout=200", str(FOLDER / name))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_benchmark_runs_every_case(tmp_path: Path) -> None:
    file = tmp_path / "smoke.json"
    _interpret("benchmarks.gpu.kernels", "--interpret-smoke", "--json", str(file))
    rows = json.loads(file.read_text())["kernels"]
    assert {row["target"] for row in rows} == {0.0, 0.75, 0.8, 0.85}
    assert all(row["time_us"] > 0 and row["met"] is None for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_comparison_of_decode_steps_runs(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    _interpret("benchmarks.gpu.decode_step", "--interpret-smoke", "--json", str(file))
    rows = json.loads(file.read_text())["steps"]
    assert [row["batch"] for row in rows] == [1, 3]
    assert all(row["tokens_alike"] == 1 for row in rows)


def _interpret(module: str, *args: str) -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *args]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
