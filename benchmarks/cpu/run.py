"""Baton and its peers on a CPU, in turns, on the same random weights: prompts, decode steps and memory.

    python -m benchmarks.cpu.run [--json FILE] [--environments build/cpu-peers] [--checkpoints build/cpu-checkpoints]
        [--shapes 0.5b,1b] [--threads 2,1] [--bits 16,8,4] [--cells prefill:512,decode:1,...] [--peers ...] [--rounds 2]
        [--loaded 2] [--resume] [--smoke]

`prefill:N` is the time from a prompt of N tokens to its next token; with 128 it is what a client waits for the first token.
`decode:B` is the time of 8 steps of B sequences behind prompts of 128 tokens each, once all have begun. Of the rounds the
least counts, on the wall and of the process's own processors, since others may share the machine. Each peer says which
kernels multiply, or oneDNN's log does, of a child that is loaded for it alone. `--loaded` says how many children hold a model
at once: with as many as there are peers all take turns cell by cell, with fewer peer by peer. `--resume` keeps what is in
FILE and measures what is missing. The machine's rates of reading and of multiplying are measured before and after, with the
same threads. A peer that is not installed, or cannot do a precision, is left out by name."""

import itertools
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.child import Answer
from benchmarks.cpu.children import ChildFailed, ChildProcess, ChildRefused, Children, Place
from benchmarks.cpu.install import python_of
from benchmarks.cpu.limits import measure_limits
from benchmarks.cpu.onednn_log import VERBOSE, multiplied_by
from benchmarks.cpu.peers import AS_IT_IS, PEERS
from benchmarks.cpu.record import Cell, Record, Setting
from benchmarks.cpu.table import show
from benchmarks.report import parser

PREDICTION = (
    "Baton is ahead of every peer in decode at 16 and 8 bits for 8 and 32 sequences, behind llama.cpp's Q4_0 for one sequence, "
    "and behind vLLM for prompts in 16 bits where the processor multiplies bfloat16; its memory is 1.5 times llama.cpp's"
)
CELLS = (
    *("prefill:128", "prefill:512", "prefill:2048"),
    *("decode:1", "decode:8", "decode:32"),
)
MEMORY = Cell("memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    environments: Path
    checkpoints: Path
    shapes: list[str]
    threads: list[int]
    bits: list[int]
    cells: list[Cell]
    peers: list[str]
    rounds: int
    loaded: int
    context: int
    steps: int
    smoke: bool


class Run:
    def __init__(self, options: Options, record: Record) -> None:
        self._options, self._record = options, record
        self._about: dict[Setting, dict[str, str]] = {}
        self._children = Children(self._load, options.loaded)

    def measure(self) -> None:
        options = self._options
        for peer in options.peers:
            if python_of(options.environments, peer) is None:
                self._record.leave_out(peer, "not installed: python -m benchmarks.cpu.install says why")
        try:
            for shape, threads in itertools.product(options.shapes, options.threads):
                self._record.add_limits(threads, measure_limits(threads, options.smoke))
                for bits in options.bits:
                    self._measure_precision(shape, threads, bits)
                self._record.add_limits(threads, measure_limits(threads, options.smoke))
        finally:
            self._children.end()

    def _measure_precision(self, shape: str, threads: int, bits: int) -> None:
        settings = [
            Setting(peer=peer, shape=shape, threads=threads, bits=bits) for peer in self._options.peers
        ]
        for setting in settings:
            self._prepare(setting)
        for number in range(self._options.rounds):
            for setting, cell in self._turns(settings):
                if not self._record.left_out(setting) and self._record.rounds(setting, cell) <= number:
                    self._measure_cell(setting, cell)
        for setting in settings:
            self._children.drop(setting)

    def _turns(self, settings: list[Setting]) -> Iterator[tuple[Setting, Cell]]:
        cells = [*self._options.cells, MEMORY]
        if self._options.loaded >= len(settings):
            return ((setting, cell) for cell in cells for setting in settings)
        return itertools.product(settings, cells)

    def _measure_cell(self, setting: Setting, cell: Cell) -> None:
        try:
            child = self._children.get(setting)
            answer = self._ask(child, cell)
        except (ChildFailed, ChildRefused) as reason:
            self._children.drop(setting)
            self._record.leave_out(setting.peer, str(reason), bits=setting.bits)
            print(f"{setting.peer:12} {setting.bits:2} bits: {reason}", flush=True)
            return
        self._record.add(setting, cell, self._about[setting], answer)
        rate = (
            f"{answer['tokens'] / answer['wall_s']:9.1f}/s"
            if "wall_s" in answer
            else f"{answer['peak_mb']:9.0f} MB"
        )
        print(
            f"{setting.shape:5} {setting.threads} threads {setting.bits:2} bits {cell.name:13} {setting.peer:13} {rate}",
            flush=True,
        )

    def _ask(self, child: ChildProcess, cell: Cell) -> dict[str, Any]:
        match cell.op:
            case "prefill":
                return child.ask("prefill", tokens=cell.size)
            case "decode":
                steps = self._options.steps if cell.size > 8 else 2 * self._options.steps
                return child.ask("decode", batch=cell.size, context=self._options.context, steps=steps)
            case _:
                return child.ask("memory")

    def _load(self, setting: Setting) -> ChildProcess:
        child, loaded = self._loaded(setting, {})
        if setting not in self._about:
            instructions = loaded["instructions"] or self._by_log(setting)
            self._about[setting] = {"format": loaded["format"], "instructions": instructions}
        self._record.add_version(setting.peer, loaded["version"])
        return child

    def _loaded(self, setting: Setting, environment: Mapping[str, str]) -> tuple[ChildProcess, Answer]:
        child = self._start(setting.peer, setting.threads, environment)
        try:
            loaded = child.ask(
                "load",
                checkpoint=str(self._checkpoint(setting.shape)),
                target=str(self._target(setting)),
                bits=setting.bits,
                threads=setting.threads,
            )
            # What a first call does beside its work, such as compiling, is not measured.
            child.ask("prefill", tokens=16, times=1)
        except BaseException:
            child.end()
            raise
        return child, loaded

    def _by_log(self, setting: Setting) -> str:
        """Return which kernels multiply, by the log of another child, since a log takes time."""
        self._log_of(setting.peer, VERBOSE).unlink(missing_ok=True)
        child, _ = self._loaded(setting, VERBOSE)
        child.end()
        return multiplied_by(self._log_of(setting.peer, VERBOSE).read_text(errors="replace"))

    def _prepare(self, setting: Setting) -> None:
        """Once for each folder of checkpoints: what is there was finished."""
        target = self._target(setting)
        if setting.peer in AS_IT_IS or self._record.left_out(setting) or target.exists():
            return
        print(f"preparing {setting.shape} in {setting.bits} bits for {setting.peer}", flush=True)
        checkpoint = self._checkpoint(setting.shape)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as made:
            new = Path(made) / "new"
            new.mkdir()
            child = self._start(setting.peer, max(self._options.threads), {})
            try:
                child.ask("prepare", checkpoint=str(checkpoint), target=str(new), bits=setting.bits)
                new.rename(target)
            except (ChildFailed, ChildRefused) as reason:
                self._record.leave_out(setting.peer, str(reason), bits=setting.bits)
                print(f"{setting.peer:12} {setting.bits:2} bits: {reason}", flush=True)
            finally:
                child.end()

    def _start(self, peer: str, threads: int, environment: Mapping[str, str]) -> ChildProcess:
        python = python_of(self._options.environments, peer)
        assert python, "left out"
        return ChildProcess(Place(peer, python, threads, self._log_of(peer, environment), environment))

    def _log_of(self, peer: str, environment: Mapping[str, str]) -> Path:
        return self._options.checkpoints / "logs" / f"{peer}{'-verbose' if environment else ''}.log"

    def _checkpoint(self, shape: str) -> Path:
        folder = self._options.checkpoints / shape / "plain"
        if not folder.exists():
            # A process of its own gives the memory back that this takes.
            subprocess.run([sys.executable, "-m", "benchmarks.cpu.shapes", shape, str(folder)], check=True)
        return folder

    def _target(self, setting: Setting) -> Path:
        return self._options.checkpoints / setting.shape / f"{setting.peer}-{setting.bits}"


def options_of(args: Any, checkpoints: Path) -> Options:
    peers = args.peers.split(",")
    smoke: bool = args.smoke
    return Options(
        environments=args.environments,
        checkpoints=checkpoints,
        shapes=["tiny"] if smoke else args.shapes.split(","),
        threads=[1] if smoke else [int(each) for each in args.threads.split(",")],
        bits=[16] if smoke else [int(each) for each in args.bits.split(",")],
        cells=[cell_of(each) for each in (("prefill:16", "decode:2") if smoke else args.cells.split(","))],
        peers=["baton", "transformers"] if smoke else peers,
        rounds=1 if smoke else args.rounds,
        loaded=args.loaded,
        context=16 if smoke else 128,
        steps=4 if smoke else 16,
        smoke=smoke,
    )


def cell_of(text: str) -> Cell:
    op, _, size = text.partition(":")
    return Cell(op, int(size))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--environments", type=Path, default=Path("build/cpu-peers"))
    made.add_argument("--checkpoints", type=Path, default=Path("build/cpu-checkpoints"))
    made.add_argument("--shapes", default="0.5b,1b")
    made.add_argument("--threads", default="2,1")
    made.add_argument("--bits", default="16,8,4")
    made.add_argument("--cells", default=",".join(CELLS))
    made.add_argument("--peers", default=",".join(PEERS))
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--loaded", type=int, default=2)
    made.add_argument("--resume", action="store_true")
    args = made.parse_args()
    record = Record(args.json, "benchmarks.cpu.run", args.resume)
    with tempfile.TemporaryDirectory() as temporary:
        options = options_of(args, Path(temporary) if args.smoke else args.checkpoints)
        Run(options, record).measure()
    show(record, sys.stdout)


if __name__ == "__main__":
    # Children that are stopped would not notice that this process has ended: `Run` ends them.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
