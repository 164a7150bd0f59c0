"""`baton replay`: a recorded scheduler's events told again, to the same code or under another tuning."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from baton.bench.recorded_trace import write_trace
from baton.tuning_trial import try_tuning
from cluster.scheduler.recorded_scheduler import replay as replay_file
from core.config.tuning_config import changes_of
from core.errors import ConfigError


def replay(
    recording: Annotated[Path, typer.Argument(help="What a server wrote to schedule.record_path.")],
    output: Annotated[Path | None, typer.Option("--log", help="Write the decisions here.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write its requests here, as a trace for `baton simulate` and `baton bench`; decide nothing."
        ),
    ] = None,
    tuning: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="Say what these constants of placement would have changed, by class (docs/architecture/placement.md).",
        ),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="With --tuning: write the answer here, too.")
    ] = None,
) -> None:
    """Replay a live event log through the policies: exit status 1 where a decision differs from the recorded one."""
    if trace is not None:
        print(f"{write_trace(recording, trace)} requests in {trace}")
        return
    if tuning:
        _try(recording, tuning, as_json)
        return
    recorded, decided = replay_file(recording)
    if output is not None:
        output.write_text("".join(f"{line}\n" for line in decided))
    differing = [pair for pair in zip(recorded, decided, strict=False) if pair[0] != pair[1]]
    print(f"{len(recorded)} decisions recorded, {len(decided)} replayed")
    if recorded != decided:
        for before, now in differing[:1]:
            print(f"the first that differs:\n  recorded {before}\n  replayed {now}")
        raise typer.Exit(1)


def _try(recording: Path, tuning: list[str], as_json: Path | None) -> None:
    try:
        changes = changes_of(tuning)
    except ValueError as error:
        raise ConfigError(f"--tuning: {error}") from None
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulated")
        found = try_tuning(recording, changes, lambda done, of: bar.update(task, completed=done, total=of))
    table = Table("class", "requests", "placed elsewhere", "in time as recorded", f"with {' '.join(tuning)}")
    for one in found:
        table.add_row(
            one.name,
            f"{one.num_requests}",
            f"{one.num_elsewhere}",
            f"{one.now_share:.1%}",
            f"{one.then_share:.1%}",
        )
    Console().print(table)
    Console().print(
        "Places are those of the recorded moments. Shares in time are simulated, on the recorded fleet."
    )
    if as_json is not None:
        as_json.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n")
