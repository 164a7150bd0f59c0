"""The lock files: they agree with pyproject.toml, everything in them has a hash, and what disagrees is said."""

import hashlib
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


def verified(folder: Path, content: bytes | None, **environment: str) -> tuple[int, str]:
    """The exit status and words of locks/verify.py for a lock that lists the digest of `torch`."""
    (lock := folder / "torch.txt").write_text(
        f"torch==9 \\\n    --hash=sha256:{hashlib.sha256(b'torch').hexdigest()}\n"
    )
    if content is not None:
        (folder / "torch-9.whl").write_bytes(content)
    done = subprocess.run(
        [sys.executable, ROOT / "locks" / "verify.py", lock, *folder.glob("*.whl")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def test_a_wheel_that_the_lock_lists_is_let_through(tmp_path: Path) -> None:
    assert verified(tmp_path, b"torch") == (0, "")


def test_another_wheel_is_refused_unless_its_digest_is_trusted(tmp_path: Path) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    code, said = verified(tmp_path, b"other")
    assert code == 1
    assert f"torch-9.whl is not installed: {tmp_path}/torch.txt does not list its SHA-256" in said
    assert f"set TORCH_SHA256={other}" in said
    assert verified(tmp_path, b"other", TORCH_SHA256=other) == (0, "")


def test_no_wheel_at_all_is_refused(tmp_path: Path) -> None:
    assert verified(tmp_path, None)[0] == 1


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ("sympy>=1.13", 1),
        ("nvidia-cublas==13.1; platform_system == 'Linux'", 0),
        ("cuda-toolkit[nvrtc]==13.0; platform_system == 'Linux'", 0),
    ],
)
def test_cudas_libraries_are_needed_by_a_torch_that_asks_for_them(
    tmp_path: Path, needs: str, expected: int
) -> None:
    (info := tmp_path / "torch-9.dist-info").mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: 9\nRequires-Dist: {needs}\n"
    )
    command = [sys.executable, ROOT / "locks" / "torch_has_cuda.py"]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, timeout=60, check=False)
    assert done.returncode == expected
