"""Runs tests/kernels/triton in Triton's interpreter: chosen when triton is imported, so in processes of their own.

They are forked from one that has loaded all that these tests need but Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import STAGES
from tests.forked import FORKED

FOLDER = Path(__file__).parent / "triton"
ROOT = Path(__file__).parents[2]
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_interpreted(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = FORKED.Process(target=_run_pytest, args=(["-x", "--timeout=200", str(FOLDER / name)], log))
    process.start()
    process.join(780)
    process.kill()
    process.join()
    assert process.exitcode == 0, log.read_text(errors="replace")[-8000:]


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_each_stage_of_make_gpu_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", "--out", str(tmp_path)]
    environment = os.environ | INTERPRETED
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=780, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == {stage.name for stage in STAGES}
    assert all(content["complete"] for content in found.values())
    kernels, steps = found["kernels"]["kernels"], found["decode_step"]["steps"]
    assert {row["target"] for row in kernels} == {0.0, 0.75, 0.8, 0.85}
    assert all(row["time_us"] > 0 and row["met"] is None for row in kernels)
    assert [row["batch"] for row in steps] == [1, 3]
    assert all(row["tokens_alike"] == 1 for row in steps)
    assert [row["instances"] for row in found["serving"]["hand_over"]] == [
        "one for everything",
        "prefill and decode",
    ]
    assert found["serving"]["offline"]["output_tokens"] > 0
    assert found["device_tests"]["passed"] > 0
    assert not found["device_tests"]["failed"]
    assert (tmp_path / "verdicts.png").stat().st_size > 1000


def _run_pytest(arguments: list[str], log: Path) -> None:
    with log.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    assert "triton" not in sys.modules, (
        "what is imported before the fork imports Triton, which is compiled then"
    )
    os.environ |= INTERPRETED
    # Plugins of pytest that have been imported already are none of these tests' business.
    sys.exit(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))
