"""docs/tutorial.md: each command runs as it is written, and prints what the page shows."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster_process import ROOT, SILENCE_S, ServeProcess, serving

PAGE = (ROOT / "docs/tutorial.md").read_text()
BLOCK = re.compile(
    r"^```bash\n(.*?)^```\n(?:\n(?:[^#`\n][^\n]*\n)*\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
STEPS = [(found[1], found[2] or "") for found in BLOCK.finditer(PAGE)]
OPTIONS = {"DECODE": "--decode", "PREFILL": "--prefill"}
VARIES = re.compile(
    r"pool=\"decode\"} [12]\.0|process \d+|attempts_lost_total \d+|key_[0-9a-f]{32}|in \d+ s$", re.MULTILINE
)
"""What differs from run to run: ids, how many sequences the killed instance had, and how long is left of a minute."""


def steps_with(word: str) -> list[tuple[str, str]]:
    found = [step for step in STEPS if word in step[0]]
    assert found, f"no command of the tutorial has {word}"
    return found


def options(target: str) -> list[str]:
    """Return the options of `baton serve` that the page's `make TARGET` stands for."""
    [line] = re.findall(rf"^make {target} (.*)$", PAGE, re.MULTILINE)
    given = dict(word.split("=", 1) for word in shlex.split(line))
    more = shlex.split(given.pop("ARGS"))
    return [*more, *(word for name, value in given.items() for word in (OPTIONS[name], value))]


def printed(command: str, server: ServeProcess) -> str:
    for old, new in (
        ("127.0.0.1:8000", f"127.0.0.1:{server.port}"),
        ("laddr.port == 8000", f"laddr.port == {server.port}"),
    ):
        command = command.replace(old, new)
    command = command.replace(".venv/bin/python", shlex.quote(sys.executable))
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=SILENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_prints_what_the_page_shows(steps: list[tuple[str, str]], server: ServeProcess) -> None:
    for command, shown in steps:
        assert shown, command
        assert VARIES.sub("…", printed(command, server)) == VARIES.sub("…", shown)


def test_every_command_of_the_page_is_tried() -> None:
    """All but those that set up and clean, which run where there is no environment yet, or no server any more."""
    untried = [command for command, _ in STEPS if "127.0.0.1:8000" not in command and "END" not in command]
    assert [command.split()[:2] for command in untried] == [
        ["git", "clone"],
        ["make", "serve"],
        ["rm", "/tmp/baton-tutorial.*"],
    ]
    assert len(STEPS) == len(untried) + 6


@pytest.mark.slow
@pytest.mark.turns(3, number=0)
@pytest.mark.timeout(600)
def test_a_killed_instance_costs_nothing_and_all_prints_what_the_page_shows(tmp_path: Path) -> None:
    steps = [step for step in steps_with("127.0.0.1:8000") if "operator" not in step[0]]
    assert len(steps) == 4
    with serving("--prefill", "1", *options("serve"), log=tmp_path / "log") as server:
        assert_prints_what_the_page_shows(steps, server)
        server.wait_idle(3)


@pytest.mark.slow
@pytest.mark.turns(3, number=1)
def test_a_tenants_key_has_its_limit(tmp_path: Path) -> None:
    [(written, _)] = steps_with("cat > /tmp/baton-tutorial.yaml")
    text = written.partition("<<'END'\n")[2].partition("END\n")[0]
    (config := tmp_path / "tutorial.yaml").write_text(text.replace("/tmp/", f"{tmp_path}/"))
    given = [word.replace("/tmp/baton-tutorial.yaml", str(config)) for word in options("local")]
    with serving("--local", *given, log=tmp_path / "log") as server:
        assert_prints_what_the_page_shows(steps_with("admin_api_key="), server)
