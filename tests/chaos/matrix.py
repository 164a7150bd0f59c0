"""Runs cases, several clusters at a time. `python -m tests.chaos.matrix [TRANSPORT ...] --json FILE` runs all of them, or those of some
transports, and writes the table of recovery times; pytest runs a part of those over NIXL and gloo, which stands in for NCCL.

The times are of this set-up, where a silent process is given up after 1 s (5 s by default)."""

import asyncio
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import parser, write
from kvtransfer.transport.nixl import available
from tests.chaos.cases import (
    FAULTS,
    KINDS,
    MESSAGES,
    STATES,
    Case,
    Outcome,
    applies,
    mistreat,
    slow_link,
)
from tests.chaos.world import ON_DEVICE, OVERRIDES, World

_CASE_S = 90.0
SHM: dict[str, Any] = {}
TCP: dict[str, Any] = {"transfer.transport": "tcp", "transfer.checksum": True}
NIXL: dict[str, Any] = {"transfer.transport": "nixl", "transfer.checksum": True}
GLOO: dict[str, Any] = {"transfer.transport": "gloo", "transfer.checksum": True}
DEVICE: dict[str, Any] = TCP | {ON_DEVICE: True}
REMOTE = {"tcp": TCP, "device": DEVICE, "gloo": GLOO} | ({"nixl": NIXL} if available() else {})
_WRITTEN_BY_OTHERS = (
    "decode.GRANTED", "decode.FENCING", "decode.RECALLING", "decode.REVOKING", "decode.CLOSING",
    "prefill.COMPUTING", "prefill.SENDING",
)  # fmt: skip
"""States in which the transport matters: these are tried over the other ones, with checksums, as well."""
_PART = (
    "kill prefill in decode.GRANTED", "stop prefill in prefill.SENDING", "restart prefill in decode.FENCING",
    "kill decode in prefill.COMPUTING", "stop decode in decode.RECALLING", "restart decode in decode.GRANTED",
)  # fmt: skip
"""The cases of those states that pytest tries over NIXL and gloo."""


@dataclass(frozen=True)
class Entry:
    name: str
    overrides: dict[str, Any]
    run: Callable[[World, str], Awaitable[Outcome]]


def entries() -> list[Entry]:
    return [*_process_entries(), *_message_entries()]


def part(all_of_them: list[Entry]) -> list[Entry]:
    """What is run each time."""
    return [e for e in all_of_them if not e.name.startswith(("nixl", "gloo")) or e.name[6:] in _PART]


def _process_entries() -> list[Entry]:
    made: list[Entry] = []
    for state in STATES:
        for fault in FAULTS:
            if not applies(state, fault):
                continue

            async def run(world: World, name: str, state: str = state, fault: str = fault) -> Outcome:
                return await Case(world, name).run(state, fault)

            if state != "decode.RECALLING":  # it takes a checksum to get there
                made.append(Entry(f"shm: {fault} in {state}", SHM, run))
            if state in _WRITTEN_BY_OTHERS and fault.split()[1] in ("prefill", "decode"):
                made += [
                    Entry(f"{name}: {fault} in {state}", overrides, run) for name, overrides in REMOTE.items()
                ]
    return made


def _message_entries() -> list[Entry]:
    made: list[Entry] = []
    for message in MESSAGES:
        for kind in KINDS:

            async def run(world: World, name: str, message: str = message, kind: str = kind) -> Outcome:
                return await mistreat(world, name, message, kind)

            made.append(Entry(f"shm: {kind} {message}", SHM, run))
    for overrides, transport in ((SHM, "shm"), (TCP, "tcp"), (DEVICE, "device")):
        made.append(Entry(f"{transport}: slow link", overrides, slow_link))
    return made


async def run_all(folder: Path, chosen: list[Entry], num_worlds: int = 3) -> dict[str, Outcome | Exception]:
    """Every entry's outcome, or what went wrong. A world in which something went wrong is replaced."""
    todo = sorted(chosen, key=lambda entry: entry.name.partition(":")[0])
    results: dict[str, Outcome | Exception] = {}

    async def work(number: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            world: World | None = None
            while todo:
                entry = todo.pop(0)
                if world is not None and world.wanted != entry.overrides:
                    await stack.aclose()
                    world = None
                try:
                    if world is None:
                        world = World(folder / f"{number}-{len(todo)}", entry.overrides)
                        await stack.enter_async_context(world)
                    async with asyncio.timeout(_CASE_S):
                        results[entry.name] = await entry.run(world, entry.name)
                except Exception as error:
                    error.add_note(f"{entry.name}; log: {world.folder / 'log'}" if world else entry.name)
                    results[entry.name] = error
                    await stack.aclose()
                    world = None

    await asyncio.gather(*(work(number) for number in range(num_worlds)))
    return results


def table(results: dict[str, Outcome | Exception]) -> list[dict[str, Any]]:
    """Per transport and fault: how many cases, how many went wrong, and the longest pause a client saw."""
    rows: dict[str, list[Outcome | Exception]] = defaultdict(list)
    for name, result in results.items():
        transport, _, what = name.partition(": ")
        message = what.split(" in ")[0]
        kind = message if " in " in what or message == "slow link" else message.split()[0] + " a message"
        rows[f"{transport}: {kind}"].append(result)
    return [
        {
            "fault": fault,
            "cases": len(outcomes),
            "failed": sum(isinstance(o, Exception) for o in outcomes),
            "longest_pause_s": round(
                max((o.recovery_s for o in outcomes if isinstance(o, Outcome)), default=0.0), 2
            ),
        }
        for fault, outcomes in rows.items()
    ]


def main() -> None:
    options = parser(__doc__, must_write=True)
    options.add_argument("transports", nargs="*", default=["shm", *REMOTE])
    args = options.parse_args()
    chosen = [entry for entry in entries() if entry.name.partition(":")[0] in args.transports]
    if args.smoke:
        chosen = chosen[:1]
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(run_all(Path(folder), chosen))
    content = {
        "set_up": OVERRIDES,
        "rows": table(results),
        "failures": {name: repr(r) for name, r in results.items() if isinstance(r, Exception)},
    }
    write(args.json, f"tests.chaos.matrix {' '.join(args.transports)} --json FILE", content)


if __name__ == "__main__":
    main()
