"""Runs cases, several clusters at a time. `python -m tests.chaos.matrix [TRANSPORT ...] --json FILE` runs all of them, or those of some
transports, and writes the table of recovery times; pytest runs a part of those over NIXL and TLS, and a third of all each day.
The witness computes, or with `--model FAMILY` a tiny model with recurrent layers. That has cases over TCP with lower tiers and a
buddy, too, in which prompts and answers are so long that states leave the pools.

The times are of this set-up, where a silent process is given up after 1 s (5 s by default)."""

import asyncio
import contextlib
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import parser, write
from kvtransfer.transport.nixl import available
from tests.chaos.cases import (
    FAULTS,
    KINDS,
    LONG,
    MESSAGES,
    STATES,
    Case,
    Outcome,
    applies,
    mistreat,
    slow_link,
)
from tests.chaos.hybrid import OVERRIDES as HYBRID_OVERRIDES
from tests.chaos.hybrid import HybridModel
from tests.chaos.model import WITNESS, Model
from tests.chaos.world import ENCRYPTED, ON_DEVICE, OVERRIDES, World
from tests.models.checkpoints import HYBRID

_CASE_S = 90.0
_LOG_LINES = 200
SHM: dict[str, Any] = {}
TCP: dict[str, Any] = {"transfer.transport": "tcp", "transfer.checksum": True}
NIXL: dict[str, Any] = {"transfer.transport": "nixl", "transfer.checksum": True}
TLS: dict[str, Any] = TCP | {ENCRYPTED: True}
DEVICE: dict[str, Any] = TCP | {ON_DEVICE: True}
TIERS: dict[str, Any] = TCP | {
    "engine.num_blocks": 330,
    "engine.disk_cache_bytes": 1 << 26,
    "engine.host_cache_bytes": 1 << 17,
    "transfer.kv_replicas": 1,
}
"""The pool has room for two checkpoints; host memory has it for a few more."""
REMOTE = {"tcp": TCP, "tls": TLS, "device": DEVICE} | ({"nixl": NIXL} if available() else {})
TRANSPORTS = {"shm": SHM} | REMOTE | {"tiers": TIERS}
_WITNESS_ALONE = ("tls", "device")
"""Nothing else computes on simulated devices, and encryption does not depend on what computes."""
_HYBRIDS_ALONE = ("tiers",)
_WRITTEN_BY_OTHERS = (
    "decode.GRANTED", "decode.FENCING", "decode.RECALLING", "decode.REVOKING", "decode.CLOSING",
    "prefill.COMPUTING", "prefill.SENDING",
)  # fmt: skip
"""States in which the transport matters: these are tried over the other ones, with checksums, as well."""
_PART = (
    "kill prefill in decode.GRANTED", "stop prefill in prefill.SENDING", "restart prefill in decode.FENCING",
    "kill decode in prefill.COMPUTING", "stop decode in decode.RECALLING", "restart decode in decode.GRANTED",
    "stop decode in decode.RESERVING",
)  # fmt: skip
"""The cases that pytest tries over `_PART_ALONE`, as far as there are any, and with a hybrid over shared memory and with tiers."""
_PART_ALONE = ("nixl", "tls")
_OF_WITNESS = ("hang", "seize")
"""Faults within a step, which the witness can have."""
_PART_FAMILY, _PART_OVER = "qwen3_next", ("shm", "tiers")


@dataclass(frozen=True)
class Entry:
    transport: str
    what: str
    run: Callable[[World, str], Awaitable[Outcome]]
    turn: int = 0
    """Over shared memory, cases whose turns differ by multiples of three have every state, fault, message and mistreatment."""
    family: str = ""
    """Which of `HYBRID` computes. Empty: the witness."""

    @property
    def setting(self) -> str:
        return f"{self.family} over {self.transport}" if self.family else self.transport

    @property
    def name(self) -> str:
        return f"{self.setting}: {self.what}"


def entries(family: str = "") -> list[Entry]:
    made = [*_process_entries(), *_message_entries()]
    return [
        replace(e, family=family)
        for e in made
        if e.transport in possible(family) and not (family and e.what.split()[0] in _OF_WITNESS)
    ]


def possible(family: str = "") -> list[str]:
    """Return what there are cases over."""
    others = _WITNESS_ALONE if family else _HYBRIDS_ALONE
    return [transport for transport in TRANSPORTS if transport not in others]


def part() -> list[Entry]:
    """What is run each time."""
    plain = [e for e in entries() if e.transport not in _PART_ALONE or e.what in _PART]
    return plain + [e for e in entries(_PART_FAMILY) if e.transport in _PART_OVER and e.what in _PART]


def _process_entries() -> list[Entry]:
    made: list[Entry] = []
    for row, state in enumerate(STATES):
        for turn, fault in enumerate(FAULTS, row):
            if not applies(state, fault):
                continue

            async def run(world: World, name: str, state: str = state, fault: str = fault) -> Outcome:
                return await Case(world, name).run(state, fault)

            async def run_long(world: World, name: str, state: str = state, fault: str = fault) -> Outcome:
                return await Case(world, name, LONG).run(state, fault)

            if fault.split()[1] in ("prefill", "decode") and fault.split()[0] not in _OF_WITNESS:
                made.append(Entry("tiers", f"{fault} in {state}", run_long, turn))
            if state != "decode.RECALLING":  # it takes a checksum to get there
                made.append(Entry("shm", f"{fault} in {state}", run, turn))
            if state in _WRITTEN_BY_OTHERS and fault.split()[1] in ("prefill", "decode"):
                made += [Entry(transport, f"{fault} in {state}", run, turn) for transport in REMOTE]
    return made


def _message_entries() -> list[Entry]:
    made: list[Entry] = []
    for row, message in enumerate(MESSAGES):
        for turn, kind in enumerate(KINDS, row):

            async def run(world: World, name: str, message: str = message, kind: str = kind) -> Outcome:
                return await mistreat(world, name, message, kind)

            made.append(Entry("shm", f"{kind} {message}", run, turn))
    slowed = enumerate(("shm", "tcp", "device"))
    made += [Entry(transport, "slow link", slow_link, turn) for turn, transport in slowed]
    return made


async def run_all(folder: Path, chosen: list[Entry], num_worlds: int = 3) -> dict[str, Outcome | Exception]:
    """Every entry's outcome, or what went wrong. A world in which something went wrong is replaced."""
    todo = sorted(chosen, key=lambda entry: entry.setting)
    results: dict[str, Outcome | Exception] = {}
    models: dict[str, Model] = {"": WITNESS}
    models |= {
        family: HybridModel(folder / family, family) for family in {e.family for e in todo if e.family}
    }

    async def work(number: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            world: World | None = None
            setting = ""
            while todo:
                entry = todo.pop(0)
                if entry.setting != setting:
                    await stack.aclose()
                    world, setting = None, entry.setting
                try:
                    if world is None:
                        own = folder / f"{number}-{len(todo)}"
                        wanted = TRANSPORTS[entry.transport]
                        if "engine.disk_cache_bytes" in wanted:
                            wanted = wanted | {"engine.disk_cache_path": str(own / "disk")}
                        world = World(own, wanted, model=models[entry.family])
                        await stack.enter_async_context(world)
                    async with asyncio.timeout(_CASE_S):
                        results[entry.name] = await entry.run(world, entry.name)
                except Exception as error:
                    error.add_note(f"{entry.name}\n{_end_of(world.folder / 'log') if world else ''}")
                    results[entry.name] = error
                    await stack.aclose()
                    world = None

    await asyncio.gather(*(work(number) for number in range(num_worlds)))
    return results


def _end_of(log: Path) -> str:
    """Return the last lines of what the processes have logged, most of it in the case that failed."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


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
    options.add_argument("transports", nargs="*", help=f"of {', '.join(TRANSPORTS)}; all of them by default")
    options.add_argument(
        "--model", choices=HYBRID, default="", metavar="FAMILY", help=f"of {', '.join(HYBRID)}"
    )
    options.add_argument(
        "--faults", nargs="*", metavar="FAULT", help="kinds of faults; all of them by default"
    )
    args = options.parse_args()
    known = possible(args.model)
    transports = args.transports or known
    if unknown := set(transports) - set(known):
        options.error(f"there are no cases over {', '.join(unknown)} here, but over {', '.join(known)}")
    chosen = [entry for entry in entries(args.model) if entry.transport in transports]
    if args.faults:
        chosen = [entry for entry in chosen if entry.what.split()[0] in args.faults]
    if args.smoke:
        chosen = chosen[:1]
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(run_all(Path(folder), chosen))
    for result in results.values():
        if isinstance(result, Exception):
            traceback.print_exception(result)
    set_up = OVERRIDES | (HYBRID_OVERRIDES if args.model else {}) | (TIERS if transports == ["tiers"] else {})
    content = {
        "set_up": set_up,
        "rows": table(results),
        "cases_with_restored_blocks": sum(
            isinstance(r, Outcome) and r.restored_blocks > 0 for r in results.values()
        ),
        "failures": {name: repr(r) for name, r in results.items() if isinstance(r, Exception)},
    }
    model = f" --model {args.model}" if args.model else ""
    faults = f" --faults {' '.join(args.faults)}" if args.faults else ""
    write(args.json, f"tests.chaos.matrix {' '.join(transports)}{model}{faults} --json FILE", content)


if __name__ == "__main__":
    main()
