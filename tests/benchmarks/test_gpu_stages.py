"""How `make gpu` runs its stages, with stages that are made up."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import STAGES, Stage, chosen, run_stages
from tests.patience import until
from tests.processes import is_running

WRITES = """
import json, pathlib, sys, time
path = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
def write(complete, **verdict):
    known = {"what": "speed", "measured": 2.0, "target": 1.0, "at_least": True, "met": True}
    path.write_text(json.dumps({"complete": complete, "verdicts": [known | verdict]}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "modules").mkdir()
    paths = [str(tmp_path / "modules"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return tmp_path


def stage(folder: Path, name: str, code: str, limit_s: float = 60) -> Stage:
    (folder / "modules" / f"{name}.py").write_text(WRITES + code)
    return Stage(name, limit_s)


def run(folder: Path, *stages: Stage, budget_s: float = 600, smoke: bool = False) -> int:
    return run_stages(stages, folder, budget_s, smoke=smoke)


def test_a_stage_that_is_complete_is_not_run_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = stage(folder, "once", 'assert not path.exists()\nwrite(True)\nprint("said")')
    assert run(folder, once) == 0
    assert run(folder, once) == 0
    assert capsys.readouterr().out.count("complete already") == 1
    assert "said" in (folder / "log.txt").read_text()


def test_a_stage_that_is_cut_leaves_what_it_has_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = stage(folder, "hangs", "write(False)\ntime.sleep(600)", limit_s=6)
    after = stage(folder, "after", "write(True)")
    assert run(folder, hangs, after) == 1
    assert json.loads((folder / "hangs.json").read_text())["verdicts"][0]["measured"] == 2.0
    assert json.loads((folder / "after.json").read_text())["complete"]
    shown = capsys.readouterr().out
    assert "its time was over" in shown
    assert "not complete: hangs" in shown


def test_a_failed_stage_shows_why_and_the_next_one_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = stage(folder, "fails", 'sys.exit("no such kernel")')
    assert run(folder, fails, stage(folder, "after", "write(True)")) == 1
    shown = capsys.readouterr().out
    assert "it exited with 1" in shown
    assert "| no such kernel" in shown
    assert (folder / "after.json").exists()


def test_a_process_that_dies_or_loses_its_device_is_followed_by_another(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first is killed, the second asks for another, and the third has what it needs."""
    code = """
tries = path.with_suffix(".tries")
number = int(tries.read_text()) if tries.exists() else 0
tries.write_text(str(number + 1))
if number == 0:
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
write(number == 2)
sys.exit(3 if number == 1 else 0)
"""
    assert run(folder, stage(folder, "frail", code)) == 0
    shown = capsys.readouterr().out
    assert "it exited with -9" in shown
    assert "it exited with 3" in shown
    endless = stage(folder, "endless", "write(False)\nsys.exit(3)")
    assert run(folder, endless) == 1
    assert capsys.readouterr().out.count("it exited with 3") == 4


def test_what_a_stage_that_is_cut_has_started_ends_with_it(folder: Path) -> None:
    code = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
path.with_suffix(".child").write_text(str(child.pid))
time.sleep(600)
"""
    run(folder, stage(folder, "starts", code, limit_s=6))
    child = int((folder / "starts.child").read_text())
    asyncio.run(until(lambda: not is_running(child)))


def test_what_has_failed_within_a_stage_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = 'path.write_text(json.dumps({"failed": {"a kernel": "RuntimeError: no\\nmore"}}))'
    assert run(folder, stage(folder, "part", code)) == 1
    assert "FAILED a kernel: RuntimeError: no\n" in capsys.readouterr().out


def test_what_a_stage_takes_and_writes_may_come_back_from_a_lent_machine() -> None:
    assert sum(stage.limit_s for stage in STAGES[:-1]) <= 600
    assert len(STAGES) + len(("log.txt",)) <= 8


def test_a_missed_target_is_said_and_is_no_success(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, stage(folder, "slow", "write(True, measured=0.5, met=False)")) == 1
    assert "MISSED speed: 0.5 (at least 1)" in capsys.readouterr().out


def test_a_smoke_run_is_interpreted(folder: Path) -> None:
    code = 'import os\nassert os.environ["TRITON_INTERPRET"] == "1"\nassert "--interpret-smoke" in sys.argv\nwrite(True)'
    assert run(folder, stage(folder, "smoke", code), smoke=True) == 0


def test_no_stage_begins_when_the_time_is_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, stage(folder, "late", "write(True)"), budget_s=0) == 1
    assert "no time is left for it" in capsys.readouterr().out
    assert not (folder / "late.json").exists()


def test_stages_are_chosen_by_name() -> None:
    assert chosen("") == list(STAGES)
    assert [one.name for one in chosen("kernels,decode_step")] == ["kernels", "decode_step"]
    with pytest.raises(SystemExit, match="no stage 'kernel'"):
        chosen("kernel")
