"""The wheel, installed outside the tree, is whole: it serves the embedded model without a file of the working tree."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.own_tree import PACKAGES
from kernels.cpu.build import find_compiler
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
START_TIMEOUT_S = 180.0
SERVE = """
import sys
from pathlib import Path
from baton.cli.main import main
from baton.own_tree import PACKAGES

sys.argv = ["baton", "serve", "--local", "--model", "embedded", "--port", sys.argv[1]]
try:
    main()
finally:
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES]
    Path("loaded").write_text("\\n".join(file for module in ours if (file := getattr(module, "__file__", None))))
"""


def copied(tree: Path) -> Path:
    """The sources in `tree`, since a build leaves its folders where it runs."""
    left_out = shutil.ignore_patterns("__pycache__")
    for name in (*PACKAGES, "benchmarks", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=left_out)
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its native kernels are compiled without optimising, which takes most of the time."""
    tree, dist = copied(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("dist")
    compiler = tree / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {shlex.join(find_compiler())} "$@" -O0\n')
    compiler.chmod(0o755)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(dist), str(tree), CXX=str(compiler))
    [built] = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a wheel has. It is made without the native kernels, which take most of the time."""
    tree, dist = copied(tmp_path_factory.mktemp("tree")), tmp_path_factory.mktemp("dist")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(dist)!r})"
    run(["-c", build], cwd=tree, CXX="none")
    [built] = dist.glob("*.whl")
    return zipfile.ZipFile(built).namelist()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--target", str(folder), str(wheel))
    return folder


def pip(command: str, *arguments: str, **environment: str) -> None:
    run(["-m", "pip", command, "--no-deps", "--no-index", *arguments], **environment)


def run(arguments: list[str], cwd: Path = ROOT, **more: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "BATON_COMPILE"} | more
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def serving(installed: Path, folder: Path) -> Iterator[str]:
    """The URL of `baton serve --local` of the installed wheel; the server has ended when the context is left."""
    port, log = free_port(), folder / "log"
    with log.open("wb") as out:
        # -P keeps the working folder off the path, and PYTHONPATH comes before an editable install.
        server = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVE, str(port)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(installed)},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, server, log)
        yield url
        server.terminate()
        server.wait(timeout=60)
    finally:
        server.kill()
        server.wait()


def wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, f"baton serve ended:\n{log.read_text()}"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"baton serve is not ready:\n{log.read_text()}")


@pytest.mark.slow
@pytest.mark.turns(3, number=1)
@pytest.mark.timeout(300)
def test_the_installed_wheel_serves_the_embedded_model_with_its_own_files_only(
    installed: Path, tmp_path: Path
) -> None:
    with serving(installed, tmp_path) as url:
        body = {"model": "baton-embedded", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert httpx.get(f"{url}/dashboard", timeout=60).status_code == 200
    loaded = (tmp_path / "loaded").read_text().splitlines()
    assert len(loaded) > 100
    assert [file for file in loaded if not Path(file).is_relative_to(installed)] == []


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(files: list[str]) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.splitlines()
    packaged = [name for name in files if ".dist-info/" not in name]
    assert sorted(set(tracked) - set(packaged)) == []
    assert {name.partition("/")[0] for name in packaged} == set(PACKAGES)


def test_every_module_that_is_listed_for_compiling_exists() -> None:
    listed = SETTINGS["tool"]["baton"]["compiled"]["modules"]
    assert [name for name in listed if not (ROOT / name).is_file()] == []
    assert len(set(listed)) == len(listed)
