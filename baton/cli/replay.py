"""`baton replay`: a recorded scheduler's events told again to a new one, and whether it decides the same."""

from pathlib import Path
from typing import Annotated

import typer

from baton.bench.recorded_trace import write_trace
from cluster.scheduler.recorded_scheduler import replay as replay_file


def replay(
    recording: Annotated[Path, typer.Argument(help="What a server wrote to schedule.record_path.")],
    output: Annotated[Path | None, typer.Option("--log", help="Write the decisions here.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write its requests here, as a trace for `baton simulate` and `baton bench`; decide nothing."
        ),
    ] = None,
) -> None:
    """Replay a live event log through the policies: exit status 1 where a decision differs from the recorded one."""
    if trace is not None:
        print(f"{write_trace(recording, trace)} requests in {trace}")
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
