"""`make audit`: fails for vulnerabilities without an exception, for exceptions that do not hold, and where nobody was asked.

A stand-in plays pip-audit, since its service is on a network."""

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / ".ci" / "audit.py"
TODAY = datetime.date(2026, 11, 30)
SOUND = {"name": "sound", "version": "1.0", "vulns": []}
VULNERABLE = {
    "name": "leaky",
    "version": "2.0",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-2026-1"], "fix_versions": ["2.1"], "description": ""}],
}
EXCEPTION = {"id": "CVE-2026-1", "package": "leaky", "reason": "Only parses our own files.", "expires": TODAY}


def audited(folder: Path, said: str, *exceptions: dict[str, Any]) -> tuple[int, str]:
    """The audit's exit status and words where pip-audit prints `said` for each of two locks."""
    (folder / "tool").mkdir()
    (folder / "tool" / "pip_audit.py").write_text(f"import sys\nprint({said!r})\nsys.exit('no network')\n")
    (folder / "locks").mkdir()
    for name in ("one.txt", "two.txt"):
        (folder / "locks" / name).write_text("sound==1.0 --hash=sha256:00\n")
    listed = "".join(
        "[[exception]]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in one.items())
        for one in exceptions
    )
    (folder / "exceptions.toml").write_text(listed)
    given = [
        "--tool",
        folder / "tool",
        "--locks",
        folder / "locks",
        "--exceptions",
        folder / "exceptions.toml",
        "--today",
        str(TODAY),
    ]
    done = subprocess.run(
        [sys.executable, TOOL, *given], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def toml(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime.date) else json.dumps(value)


def answer(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


def test_sound_releases_pass(tmp_path: Path) -> None:
    assert audited(tmp_path, answer(SOUND))[0] == 0


def test_a_vulnerability_fails_once_with_its_names_and_what_mends_it(tmp_path: Path) -> None:
    code, said = audited(tmp_path, answer(SOUND, VULNERABLE))
    assert code == 1
    assert said.count("leaky 2.0: CVE-2026-1, PYSEC-1: fixed in 2.1") == 1


@pytest.mark.parametrize("name", ["CVE-2026-1", "PYSEC-1"])
def test_an_exception_by_any_name_holds_until_its_last_day(tmp_path: Path, name: str) -> None:
    assert audited(tmp_path, answer(VULNERABLE), EXCEPTION | {"id": name})[0] == 0


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"expires": TODAY - datetime.timedelta(days=1)}, "expired on"),
        ({"expires": TODAY + datetime.timedelta(days=181)}, "180 days are the most"),
        ({"expires": "2027-01-31"}, "expires, which is a date"),
        ({"reason": " "}, "has id, package, reason and expires"),
        ({"package": "other"}, "leaky 2.0: CVE-2026-1"),
        ({"id": "CVE-2026-2"}, "CVE-2026-2 in leaky: the exception is not needed any more"),
    ],
)
def test_an_exception_that_does_not_hold_fails(
    tmp_path: Path, changed: dict[str, Any], expected: str
) -> None:
    code, said = audited(tmp_path, answer(VULNERABLE), EXCEPTION | changed)
    assert code == 1
    assert expected in said


def test_an_exception_without_a_field_fails(tmp_path: Path) -> None:
    code, said = audited(
        tmp_path, answer(VULNERABLE), {"id": "CVE-2026-1", "package": "leaky", "expires": TODAY}
    )
    assert code == 1
    assert "has id, package, reason and expires" in said


def test_an_expired_exception_fails_without_a_network(tmp_path: Path) -> None:
    code, said = audited(tmp_path, "", EXCEPTION | {"expires": datetime.date(2026, 1, 1)})
    assert code == 1
    assert "CVE-2026-1 in leaky: its exception expired on 2026-01-01" in said


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Traceback",
        answer({"name": "sound", "skip_reason": "not found"}),
        answer(),
        json.dumps({"fixes": []}),
    ],
    ids=["nothing", "no JSON", "a package is skipped", "no package", "no list"],
)
def test_an_audit_that_was_not_answered_for_every_package_never_passes(tmp_path: Path, said: str) -> None:
    code, words = audited(tmp_path, said)
    assert code == 2
    assert "nothing is known" in words


def test_the_exceptions_of_today_hold() -> None:
    """No network is asked: pip-audit is not there."""
    done = subprocess.run(
        [sys.executable, TOOL, "--tool", "/nowhere"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2, done.stdout
