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
@pytest.mark.turns(3)
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
@pytest.mark.turns(6, number=1)
@pytest.mark.timeout(800)
def test_each_stage_of_make_gpu_runs(tmp_path: Path) -> None:
    """Without what `make gpu-packages` does not bring, and a machine with a GPU hardly has."""
    (tmp_path / "bare").mkdir()
    absent = ("ray", "kubernetes", "gguf", "nixl_cu12", "nixl_cu13", "openai", "anthropic")
    (tmp_path / "bare" / "sitecustomize.py").write_text(
        f"import sys\nsys.modules |= dict.fromkeys({absent})\n"
    )
    stages = [stage.name for stage in STAGES if stage.name != "on_ray"]
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--smoke",
        "--only",
        ",".join(stages),
        "--out",
        str(tmp_path),
    ]
    environment = os.environ | INTERPRETED | {"PYTHONPATH": str(tmp_path / "bare")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=780, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == set(stages)
    assert all(content["complete"] for content in found.values())
    rows = {name: content["rows"] for name, content in found.items()}
    assert not any(content["failed"] for content in found.values())
    kernels = [row for row in rows["kernels"].values() if "target" in row]
    assert {row["target"] for row in kernels} == {0.0, 0.75, 0.8, 0.85}
    assert all(row["time_us"] > 0 for row in kernels)
    steps = [row for row in rows["decode_step"].values() if "batch" in row]
    assert [row["batch"] for row in steps] == [1, 3]
    assert all(row["tokens_alike"] == 1 and row["replayed_ms"] > 0 for row in steps)
    whole, apart = (rows["serving"][name] for name in ("one for everything", "prefill and decode"))
    assert whole["tokens_alone"] == apart["tokens_alone"], "the same answers, handed over between processes"
    assert (whole["handed_over"], apart["handed_over"] > 0) == (0, True)
    assert rows["serving"]["offline"]["output_tokens"] > 0
    assert rows["one_card"]["memory of another process"]["alike"] == 1
    assert rows["one_card"]["in turns"]["step_ms_beside_prompts"] > 0
    (tests,) = rows["device_tests"].values()
    assert tests["passed"] > 0
    assert not tests["failed"]
    assert all(one["met"] is None for content in found.values() for one in content["verdicts"])


@pytest.mark.slow
@pytest.mark.turns(6, number=4)
@pytest.mark.timeout(400)
def test_actors_that_share_a_card_are_rehearsed_on_ray(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", "--only", "on_ray", "--out", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | INTERPRETED,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    verdicts = json.loads((tmp_path / "on_ray.json").read_text())["verdicts"]
    alike = [one["measured"] for one in verdicts if "texts" in one["what"]]
    assert alike == [1.0] * 6


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
