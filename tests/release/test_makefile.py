"""`make help` lists every target that people may call, with what it does."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Makefile").read_text()
PHONY = {name for line in re.findall(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE) for name in line.split()}
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", TEXT, re.MULTILINE))


def helped() -> dict[str, str]:
    """A make that is itself started by make would also say which folder it enters."""
    said = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    return {line.split()[1]: line.split(maxsplit=2)[2] for line in said.splitlines()}


def test_help_has_a_line_for_every_target() -> None:
    assert {"setup", "serve", "test", "lock", "audit"} <= TARGETS
    assert set(helped()) == TARGETS
    assert all(len(line) > 10 for line in helped().values())


def test_no_target_is_taken_for_a_file() -> None:
    assert PHONY == TARGETS
