"""The results' headlines are what their files say, and each command that they name still writes such a file."""

import json
import math
import multiprocessing
import re
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.figures import FIGURES
from tests.benchmarks.small_traces import write_traces
from tests.forked import FORKED
from tests.parallel.forked_ranks import start_forked

PACKAGES = ("benchmarks.goodput",)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SLOW = {
    "benchmarks.serving.cluster_memory", "benchmarks.serving.cluster_start", "benchmarks.engine.cold_start", "benchmarks.cpu.run", "benchmarks.cpu.cpu_memory", "benchmarks.cpu.cpu_sharing", "benchmarks.cpu.cpu_waking", "benchmarks.cpu.servers", "benchmarks.parallel.expert_balance", "benchmarks.simulator.fidelity",
    "benchmarks.serving.first_minutes", "benchmarks.serving.hostile_bodies", "benchmarks.serving.load_balancer", "benchmarks.parallel.parallel_ranks", "benchmarks.engine.perplexity", "benchmarks.goodput plan_questions",
    "benchmarks.engine.quantised_weights", "benchmarks.transfer.remote_memory", "benchmarks.serving.scheduler_loss", "benchmarks.serving.sharing_memory", "benchmarks.parallel.served_grid", "benchmarks.serving.serving_overhead",
    "benchmarks.soak.soak", "benchmarks.serving.streaming", "benchmarks.serving.resumable_streams", "benchmarks.transfer.encryption", "benchmarks.transfer.transport", "benchmarks.transfer.transport_overlap", "tests.chaos.matrix",
    "benchmarks.engine.state_checkpoints", "benchmarks.engine.speculation", "benchmarks.engine.structured", "benchmarks.cache.session_prefetch",
    "benchmarks.goodput batches", "benchmarks.goodput wide", "benchmarks.goodput known", "benchmarks.goodput shortlists", "benchmarks.goodput arrivals",
    "tests.chaos.hung_ranks", "tests.chaos.lost_behind_balancers", "tests.chaos.lost_limits",
}  # fmt: skip
"""These start processes that take long to start, make checkpoints, or simulate much: each runs on one day of seven."""
SLOWLY = [pytest.mark.slow, pytest.mark.turns(7)]


@dataclass(frozen=True)
class Headline:
    """A row of the table."""

    measured: list[str]
    """The numbers of its cell, as they are written."""
    file: str
    command: tuple[str, ...]
    """What follows `python -m`."""

    @property
    def name(self) -> str:
        return name_of(self.command)


def name_of(command: Sequence[str]) -> str:
    """Return the module, and what it is asked for if it is a package."""
    return " ".join(command[: 2 if command[0] in PACKAGES else 1])


def headlines() -> Iterator[Headline]:
    for line in (RESULTS / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("|") and len(cells) == 6 and "`" in cells[5]:
            words = shlex.split(cells[5].strip("`"))
            file = re.search(r"\]\((.*)\)", cells[4])
            assert file, line
            yield Headline(NUMBER.findall(cells[2]), file[1], tuple(words[words.index("-m") + 1 :]))


def by_file() -> dict[str, list[Headline]]:
    found: defaultdict[str, list[Headline]] = defaultdict(list)
    for headline in headlines():
        found[headline.file].append(headline)
    return found


def exact(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if wanted.items() <= row.items()][:1]
    return row


def any_row(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    """A smoke run has other sizes: any row that has such fields."""
    return next(row for row in rows if wanted.keys() <= row.keys())


def test_each_file_of_the_table_is_known() -> None:
    assert {file: len(rows) for file, rows in by_file().items()} == {
        file: len(functions) for file, functions in FIGURES.items()
    }


@pytest.mark.parametrize("file", FIGURES)
def test_the_headlines_are_what_the_file_says(file: str) -> None:
    content = json.loads((RESULTS / file).read_text())
    for headline, figures in zip(by_file()[file], FIGURES[file], strict=True):
        values = figures(content, exact)
        for written, value in zip(headline.measured[: len(values)], values, strict=True):
            decimals = len(written.partition(".")[2])
            half = 0.5 * 10**-decimals + 1e-9
            assert float(written.replace(",", "")) == pytest.approx(value, rel=0, abs=half)


def exit_code(main: Callable[[], None]) -> object:
    try:
        main()
    except SystemExit as end:
        return end.code
    return None


def commands() -> Iterator[Any]:
    for file, rows in by_file().items():
        (command,) = {row.command for row in rows}
        marks = [*SLOWLY] if name_of(command) in SLOW else []
        if command[0] == "benchmarks.serving.load_balancer":
            there = shutil.which("haproxy") and shutil.which("nginx")
            marks.append(pytest.mark.skipif(not there, reason="haproxy and nginx are not installed"))
        yield pytest.param(file, command, id=name_of(command), marks=marks)


def other_commands() -> set[tuple[str, ...]]:
    """What the subjects' pages name beside the commands of the headlines, without what needs a GPU."""
    pages = "".join(page.read_text() for page in RESULTS.glob("*.md"))
    named = {
        tuple(shlex.split(words)) for words in re.findall(r"`[^`\n]*python (?:-P )?-m ([^`\n]+)`", pages)
    }
    known = {headline.name for headline in headlines()}
    return {
        words for words in named if name_of(words) not in known and not words[0].startswith("benchmarks.gpu")
    }


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    write_traces(folder)
    return folder


@pytest.mark.parametrize(("file", "command"), [*commands()])
def test_each_command_writes_what_its_headlines_need(
    file: str, command: tuple[str, ...], traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / file
    run(command, out, traces, monkeypatch)
    content = json.loads(out.read_text())
    for figures in FIGURES[file]:
        assert all(math.isfinite(value) for value in figures(content, any_row))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(words, id=name_of(words), marks=SLOWLY if name_of(words) in SLOW else [])
        for words in sorted(other_commands())
    ],
)
def test_each_other_command_of_the_pages_runs(
    command: tuple[str, ...], traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(command, tmp_path / "out.json", traces, monkeypatch)
    assert json.loads((tmp_path / "out.json").read_text())


def run(command: tuple[str, ...], out: Path, traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, in smoke mode, on small traces. Processes that it spawns are forked from one with the code loaded."""
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: FORKED)
    monkeypatch.setattr("benchmarks.parallel.parallel_ranks.start_children", start_forked)
    profile = out.with_name("profile.json")
    profile.write_text(
        json.dumps(json.loads((RESULTS / "fidelity.json").read_text())["local"]["setup"]["profile"])
    )
    replaced = {"profile.json": str(profile), out.name: str(out)}
    module, *words = [replaced.get(word, word.replace("../shared/traces", str(traces))) for word in command]
    arguments = [*words, "--smoke", *(() if "--json" in words else ("--json", str(out)))]
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.chdir(RESULTS.parents[1])
    assert not exit_code(import_module(f"{module}.__main__" if module in PACKAGES else module).main)
