"""Every command is found under its name, and begins without what it does not need."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from baton.cli.main import app
from core.errors import ConfigError

COMMANDS = [
    "serve",
    "chat",
    "bench",
    "simulate",
    "profile",
    "quantize",
    "plan",
    "replay",
    "doctor",
    "up",
    "down",
    "status",
    "deploy",
    "top",
    "models",
    "rollout",
    "pods",
]


def test_help_names_every_command_and_what_it_does() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.partition("Commands:")[2].splitlines()]
    named = [row for row in rows if row and row[0] in COMMANDS]
    assert [row[0] for row in named] == COMMANDS
    assert all(len(row) > 3 for row in named), "one does not say what it does"


@pytest.mark.parametrize("name", COMMANDS)
def test_what_the_list_says_of_a_command_is_its_own_help(name: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    command = group.get_command(click.Context(group), name)
    assert command is not None
    imported = command.make_context(name, [], resilient_parsing=True).command
    assert command.help == imported.help


def test_a_command_that_is_not_there_is_refused() -> None:
    result = CliRunner().invoke(app, ["deploi"])
    assert result.exit_code == 2
    assert "deploy" in result.output


@pytest.mark.parametrize(
    ("command", "without"),
    [
        ("", ("ray", "torch", "transformers")),
        ("chat", ("ray", "torch")),
        ("top", ("ray", "torch")),
        ("models", ("ray", "torch")),
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
        f"assert CliRunner().invoke(app, {[*command.split(), '--help']}).exit_code == 0\n"
        f"print([name for name in {without!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


NOWHERE = "/no/such/folder/x.json"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "--trace", "t", "--json", NOWHERE], f"cannot write {NOWHERE}"),
        (["plan", "--trace", "t", "--picture", "x.doc"], "a picture's name ends in .png, .svg or .pdf"),
        (["simulate", "--trace", "t", "--json", NOWHERE], f"cannot write {NOWHERE}"),
        (["simulate", "--trace", "t", "--report", "/dev/null/x"], "cannot make the folder /dev/null/x"),
        (["profile", NOWHERE], f"cannot write {NOWHERE}"),
        (["bench", "--plot", "x.doc"], "a picture's name ends in"),
        (["serve", "--set", "engine.block_size=["], "--set engine.block_size: '[' is not YAML"),
        (["serve", "--config", "BINARY"], "is not UTF-8 text"),
    ],
)
def test_what_cannot_be_written_or_read_is_said_before_any_work(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe")
    arguments = [str(binary) if part == "BINARY" else part for part in arguments]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError)
    assert said in str(error)
    assert "\n" not in str(error)
