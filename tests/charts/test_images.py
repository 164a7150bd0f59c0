"""The Dockerfiles: linted, pinned, without root, and fed with what the package consists of. Nothing is built here."""

import fnmatch
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from baton.own_tree import PACKAGES
from cluster.preflight.hydra import NEEDED
from tests.charts.rendering import CHART, ROOT

FILES = ("Dockerfile", "Dockerfile.cpu")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def instructions(name: str) -> list[dict[str, Any]]:
    return DockerfileParser(fileobj=io.BytesIO((ROOT / name).read_bytes())).structure


def values(name: str, instruction: str) -> list[str]:
    return [one["value"] for one in instructions(name) if one["instruction"] == instruction]


def arguments(name: str) -> dict[str, str]:
    return dict(value.partition("=")[::2] for value in values(name, "ARG"))


def test_hadolint_is_content() -> None:
    binary = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([binary, *FILES], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", FILES)
def test_every_base_is_pinned(name: str) -> None:
    stages: set[str] = set()
    for value in values(name, "FROM"):
        image, _, stage = value.partition(" AS ")
        image = image.replace("${PYTHON}", arguments(name)["PYTHON"])
        assert image in stages or any(character.isdigit() for character in image.partition(":")[2]), image
        assert "latest" not in image
        stages.add(stage)


@pytest.mark.parametrize("name", FILES)
def test_it_does_not_run_as_root_and_is_the_charts_user(name: str) -> None:
    made = instructions(name)
    final = max(index for index, one in enumerate(made) if one["instruction"] == "FROM")
    [user] = [index for index, one in enumerate(made) if one["instruction"] == "USER"]
    assert user > final
    assert made[user]["value"] == "1000:1000"
    assert "RUN" not in {one["instruction"] for one in made[user:]}
    assert "runAsUser: 1000" in (CHART / "templates" / "_pod.tpl").read_text()


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_exists(name: str) -> None:
    stages = {value.partition(" AS ")[2] for value in values(name, "FROM")}
    for value in values(name, "COPY"):
        if value.startswith("--from="):
            assert value.split()[0].removeprefix("--from=") in stages
        else:
            assert all((ROOT / source).exists() for source in value.split()[:-1])


def test_the_context_has_all_packages_and_nothing_that_a_build_does_not_need() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    assert allowed == {*PACKAGES, "LICENSE", "README.md", "locks", "pyproject.toml", "setup.py"}
    assert all((ROOT / name).exists() for name in allowed)
    assert not any(fnmatch.fnmatch(name, "*secret*") for name in allowed)


@pytest.mark.parametrize("name", FILES)
def test_the_image_has_the_compiled_scheduler(name: str) -> None:
    steps = values(name, "RUN")
    [built] = [index for index, one in enumerate(steps) if "BATON_COMPILE=1 /opt/build/bin/pip wheel" in one]
    assert "/opt/baton/bin/pip install --no-deps --no-index /wheels/*.whl" in steps[built]
    assert any("gcc" in one and "libc6-dev" in one for one in steps[:built])


@pytest.mark.parametrize("name", FILES)
def test_every_release_comes_from_the_locks_with_its_hash(name: str) -> None:
    for step in values(name, "RUN"):
        for command in re.findall(r"pip (?:install|download|wheel)[^&]*", step):
            assert "--no-deps" in command, command
            assert (
                "--require-hashes" in command
                or "--no-index" in command
                or "--no-build-isolation" in command
                or (command.startswith("pip download") and "python locks/verify.py locks/torch.txt" in step)
            ), command


def locked(*names: str) -> str:
    return "".join((ROOT / "locks" / f"{name}.txt").read_text() for name in names)


def test_the_wheel_in_the_image_has_every_file_of_the_packages() -> None:
    data: dict[str, list[str]] = PYPROJECT["tool"]["setuptools"]["package-data"]
    patterns = [
        f"{package.replace('.', '/')}/{pattern}" for package, some in data.items() for pattern in some
    ]
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [name for name in listed.stdout.split() if not name.endswith(".py")]
    assert [name for name in files if not any(fnmatch.fnmatch(name, one) for one in patterns)] == []


def test_the_gpu_image_has_nccl_tests_that_run_over_nodes_and_what_starts_them() -> None:
    steps = " ".join(values("Dockerfile", "RUN"))
    assert "MPI=1 MPI_HOME=/opt/mpich" in steps
    for program in NEEDED:
        assert (
            program in steps or program == "setpriv"
        )  # which Debian's util-linux has, without which there is no Debian
    [path] = [value for value in values("Dockerfile", "ENV") if "PYTHONUNBUFFERED" in value]
    assert "/opt/nccl-tests/bin" in path


def test_the_gpu_image_has_one_cuda() -> None:
    """torch's wheel on PyPI is built for CUDA 13."""
    steps = " ".join(values("Dockerfile", "RUN"))
    found = locked(*re.findall(r"locks/([a-z-]+)\.txt", steps))
    assert PROJECT["optional-dependencies"]["gpu"] == ["cupy-cuda13x>=14"]
    assert re.findall(r"^((?:cupy|nixl)\S*)==", found, re.MULTILINE) == ["cupy-cuda13x", "nixl-cu13"]
    assert set(re.findall(r"^nvidia-\S+-(cu\d+)==", found, re.MULTILINE)) == {"cu13"}
    assert any(value.startswith("nvidia/cuda:13.") for value in values("Dockerfile", "FROM"))


def test_image_and_chart_are_of_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == PROJECT["version"]
    [ray] = [one for one in PROJECT["dependencies"] if one.startswith("ray[")]
    assert ray.startswith(f"ray[serve]>={chart['annotations']['rayVersion'].removesuffix('.0')},")
    assert {"kubernetes>=37"} == set(PROJECT["optional-dependencies"]["k8s"])
