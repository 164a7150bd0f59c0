"""Audit what `locks/` pins with pip-audit: every vulnerability that is known and not excepted fails.

`audit-exceptions.toml` beside this file lists the exceptions. One that has expired fails, and so does one that excepts nothing
any more. Exits with 1 for findings, and with 2 where the service of vulnerabilities did not answer for every package."""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LONGEST = datetime.timedelta(days=180)
FIELDS = {"id", "package", "reason", "expires"}


class Unanswered(Exception):
    """pip-audit could not say of every package whether it is vulnerable."""


@dataclass(frozen=True, slots=True)
class Finding:
    package: str
    version: str
    ids: frozenset[str]
    """The vulnerability's name and its aliases."""
    fixed_in: tuple[str, ...]

    def __str__(self) -> str:
        fixed = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no release mends it"
        return f"{self.package} {self.version}: {', '.join(sorted(self.ids))}: {fixed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tool", type=Path, required=True, help="the folder that pip-audit is installed into"
    )
    parser.add_argument("--locks", type=Path, default=HERE.parent / "locks")
    parser.add_argument("--exceptions", type=Path, default=HERE / "audit-exceptions.toml")
    parser.add_argument(
        "--today", type=datetime.date.fromisoformat, default=datetime.datetime.now(datetime.UTC).date()
    )
    given = parser.parse_args()
    exceptions = tomllib.loads(given.exceptions.read_text()).get("exception", [])
    mistakes = list(wrong(exceptions, given.today))
    if not mistakes:
        try:
            found, num_packages = audited(sorted(given.locks.glob("*.txt")), given.tool)
        except Unanswered as error:
            print(
                f"audit: nothing is known: {error}\nTry again where the service of vulnerabilities can be reached."
            )
            return 2
        mistakes = list(compared(found, exceptions))
        print(f"audit: {num_packages} releases, {len(found)} vulnerabilities, {len(exceptions)} exceptions")
    print("\n".join(mistakes))
    return 1 if mistakes else 0


def wrong(exceptions: Iterable[Mapping[str, Any]], today: datetime.date) -> Iterator[str]:
    """Yield a sentence per exception that does not hold today."""
    for one in exceptions:
        name, expires = one.get("id", "an exception without id"), one.get("expires")
        if set(one) != FIELDS or not str(one["reason"]).strip() or type(expires) is not datetime.date:
            yield f"{name}: an exception has id, package, reason and expires, which is a date such as 2027-01-31"
        elif expires < today:
            yield f"{name} in {one['package']}: its exception expired on {expires}: upgrade, or give a new reason and date"
        elif expires > today + LONGEST:
            yield f"{name} in {one['package']}: its exception lasts until {expires}: {LONGEST.days} days are the most"


def audited(locks: Iterable[Path], tool: Path) -> tuple[list[Finding], int]:
    """Return what is known against the releases in `locks`, and how many releases these are."""
    findings: dict[tuple[str, str, frozenset[str]], Finding] = {}
    releases: set[tuple[str, str]] = set()
    for lock in locks:
        for one in asked(lock, tool):
            if reason := one.get("skip_reason"):
                raise Unanswered(f"locks/{lock.name}: {reason}")
            releases.add((one["name"], one["version"]))
            for known in one["vulns"]:
                ids = frozenset([known["id"], *known.get("aliases", [])])
                found = Finding(one["name"], one["version"], ids, tuple(known["fix_versions"]))
                findings[found.package, found.version, ids] = found
    if not releases:
        raise Unanswered("pip-audit looked at no release")
    return list(findings.values()), len(releases)


def asked(lock: Path, tool: Path) -> list[dict[str, Any]]:
    """Return what pip-audit says of each entry of a lock that is for this platform."""
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--disable-pip",
        "--require-hashes",
        "--progress-spinner",
        "off",
    ]
    done = subprocess.run(
        [*command, "--format", "json", "--desc", "off", "--requirement", str(lock)],
        env={**os.environ, "PYTHONPATH": str(tool)},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        raise Unanswered(
            f"locks/{lock.name}: pip-audit ended with {done.returncode}: {done.stderr[-500:]}"
        ) from None


def compared(found: Iterable[Finding], exceptions: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence per vulnerability without an exception, and per exception without a vulnerability."""
    excepted = {(one["package"], one["id"]) for one in exceptions}
    used: set[tuple[str, str]] = set()
    for finding in found:
        mine = {(finding.package, name) for name in finding.ids} & excepted
        used |= mine
        if not mine:
            yield str(finding)
    for package, name in sorted(excepted - used):
        yield f"{name} in {package}: the exception is not needed any more: remove it"


if __name__ == "__main__":
    sys.exit(main())
