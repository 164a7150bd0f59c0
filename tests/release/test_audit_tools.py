"""The tools of locks/audit.txt, as `make sbom` and `make audit` run them."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.clients.run_client import install_locked

ROOT = Path(__file__).resolve().parents[2]
NO_NETWORK = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    install_locked("audit", folder := tmp_path_factory.mktemp("audit"))
    (folder / ".ready").touch()
    return folder


def make(target: str, audit: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    given = [f"{name}={value}" for name, value in {"AUDIT": str(audit), **variables}.items()]
    return subprocess.run(
        ["make", target, *given], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )


def test_the_list_of_an_images_packages_has_every_release_of_its_locks(audit: Path, tmp_path: Path) -> None:
    done = make("sbom", audit, SBOM=str(listed := tmp_path / "made" / "baton.cdx.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(listed.read_text())
    assert made["bomFormat"] == "CycloneDX"
    assert made["metadata"]["component"]["name"] == "baton-serve"
    names = ("torch", "cuda", "triton", "image", "image-gpu")
    pinned = "".join((ROOT / "locks" / f"{name}.txt").read_text() for name in names)
    wanted = set(re.findall(r"^([a-z0-9.-]+)==([^ ;]+)", pinned, re.MULTILINE))
    assert {(one["name"], one["version"]) for one in made["components"]} == wanted
    assert len(wanted) > 100


def test_an_audit_without_a_network_fails_and_says_so(audit: Path, tmp_path: Path) -> None:
    """Nor has it what an earlier audit of this machine was answered."""
    nothing_kept = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "PIP_CACHE_DIR"), str(tmp_path))
    done = make("audit", audit, **nothing_kept, **NO_NETWORK)
    assert done.returncode != 0
    assert "audit: nothing is known" in done.stdout
