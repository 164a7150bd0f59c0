"""The lock files: they agree with pyproject.toml, everything in them has a hash, and what disagrees is said."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted(path.name for path in (ROOT / "locks").glob("*.txt"))
TOOL = ROOT / ".ci" / "lock.py"


def checked(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, "check", "--root", root],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert re.search(old, text, re.MULTILINE), old
    path.write_text(re.sub(old, new, text, count=1, flags=re.MULTILINE))


def test_the_locks_agree_with_pyproject() -> None:
    done = checked(ROOT)
    assert (done.returncode, done.stdout) == (
        0,
        "locks: they agree with pyproject.toml and with each other\n",
    )


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("pyproject.toml", '"httpx>=0.28"', '"httpx>=0.28,!=0.28.9"', "locks/dev.txt was made from other requirements"),
        ("pyproject.toml", '"httpx>=0.28"', '"httpx>=99"', "asks for httpx>=99, the locks have "),
        ("pyproject.toml", '"httpx>=0.28"', '"httpx>=0.28", "frobnicate"', "asks for frobnicate, the locks have none"),
        ("pyproject.toml", r'^  "rich>=15",\n', "", "locks/image.txt was made from other requirements"),
        ("locks/dev.txt", r"^(anyio==\S+) \\\n(    --hash=\S+(?: \\)?\n)+", r"\1\n", "anyio .* in locks/dev.txt has no hash"),
        ("locks/image.txt", r"^anyio==\S+", "anyio==0.0.1", "locks/dev.txt has anyio .* and locks/image.txt 0.0.1"),
        ("locks/dev.txt", r"\A", "--index-url https://example.org/simple\n", "locks/dev.txt names an address"),
        ("locks/torch.txt", r"^    --hash=sha256:6746\S+ \\\n", "", "misses the other build of torch 2.13.0"),
    ],
)  # fmt: skip
def test_a_disagreement_is_said(tree: Path, file: str, old: str, new: str, said: str) -> None:
    edit(tree / file, old, new)
    done = checked(tree)
    assert done.returncode == 1
    assert re.search(said, done.stdout), done.stdout


def test_a_missing_lock_is_a_disagreement(tree: Path) -> None:
    (tree / "locks" / "audit.txt").unlink()
    assert "locks/audit.txt was made from other requirements" in checked(tree).stdout


def test_the_locks_of_working_trees_leave_torchs_builds_to_their_own_files() -> None:
    """So that a machine for CPUs fetches nothing of CUDA."""
    for name in ("dev.txt", "image.txt"):
        assert (
            re.findall(
                r"^(?:torch|triton|nvidia-\S+|cuda-\S+)==", (ROOT / "locks" / name).read_text(), re.MULTILINE
            )
            == []
        )
    assert {"cuda.txt", "torch.txt", "triton.txt"} <= set(LOCKS)


NPM = sorted((ROOT / "tests" / "clients" / "npm").iterdir())


@pytest.mark.parametrize("folder", NPM, ids=lambda path: path.name)
def test_every_npm_package_of_the_tests_has_one_version_and_a_hash(folder: Path) -> None:
    asked = json.loads((folder / "package.json").read_text())["dependencies"]
    lock = json.loads((folder / "package-lock.json").read_text())["packages"]
    assert lock[""]["dependencies"] == asked
    for name, version in asked.items():
        assert lock[f"node_modules/{name}"]["version"] == version
    for name, package in lock.items():
        assert name == "" or package["integrity"].startswith("sha512-"), name
        assert "resolved" not in package, "npm takes it from the registry that it is told"
