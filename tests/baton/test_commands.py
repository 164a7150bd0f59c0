"""Every command is found under its name, and begins without what it does not need."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from baton.cli.main import app

COMMANDS = [
    "serve",
    "chat",
    "bench",
    "simulate",
    "profile",
    "plan",
    "replay",
    "doctor",
    "up",
    "down",
    "status",
    "deploy",
    "top",
    "rollout",
]


def test_help_names_every_command_and_what_it_does() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    rows = [line.strip("│ ").split() for line in result.output.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows if row and row[0] in COMMANDS] == COMMANDS


def test_a_command_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(app, ["deploi"])
    assert result.exit_code == 2
    assert "deploy" in result.output


@pytest.mark.parametrize(
    ("command", "without"),
    [
        ("chat", ("ray", "torch")),
        ("top", ("ray", "torch")),
        ("replay", ("ray", "torch")),
        ("simulate", ("ray", "torch")),
        ("deploy", ("torch", "transformers")),
        ("rollout", ("torch", "transformers")),
        ("status", ("torch", "transformers")),
    ],
)
def test_a_command_that_computes_nothing_begins_without_what_computes(
    command: str, without: tuple[str, ...]
) -> None:
    """In a process of its own: this one has all of it."""
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from baton.cli.main import app\n"
        f"assert CliRunner().invoke(app, [{command!r}, '--help']).exit_code == 0\n"
        f"print([name for name in {without!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
