"""Searches for the highest rate at which enough requests hold their targets, and what bounds it.

Goodput is requests per second and instance offered at that rate; a refused or unfinished request has missed. A rate is reached
by superposing copies of what is offered."""

import ast
import hashlib
import multiprocessing
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TypeVar

from rich.progress import track

from benchmarks.goodput.loads import NUM_INSTANCES, Cell
from sim.bound import Needs
from sim.catalogued import engine_of
from sim.goodput import Window, attained

PRECISION, MAX_STEPS = 1.08, 9
EVER_PRECISION, EVER_STEPS = 1.01, 24
_TIME_FOR = 0.9
"""The share of the requests for which a bound's own search begins."""

T = TypeVar("T")
R = TypeVar("R")


def highest(
    measure: Callable[[float], float],
    wanted: float,
    guess: float,
    precision: float = PRECISION,
    max_steps: int = MAX_STEPS,
) -> float:
    """Return the largest argument at which the falling `measure` is still `wanted`; 0 where there is none. An argument
    `precision` times as large is too large."""
    low, high, at = 0.0, 0.0, guess
    for _ in range(max_steps):
        if measure(at) >= wanted:
            low = at
        else:
            high = at
        if low and high:
            if high / low < precision:
                break
            at = (low * high) ** 0.5
        else:
            at = low * 1.6 if low else high / 1.6
    return low


class Curve:
    """The share of a cell's requests in time, by copies. It is remembered, so that several targets share their runs."""

    def __init__(self, measure: Callable[[float], float]) -> None:
        self._measure = measure
        self.points: dict[float, float] = {}

    def __call__(self, copies: float) -> float:
        if copies not in self.points:
            self.points[copies] = self._measure(copies)
        return self.points[copies]

    def by_rate(self, per_copy: float) -> dict[str, float]:
        """Return the shares by requests per second and instance."""
        return {f"{copies * per_copy:.4g}": round(share, 4) for copies, share in sorted(self.points.items())}


def in_time(cell: Cell, copies: float, least: float = 0.0) -> float:
    """Return the share of a cell's requests that held their targets. A run is cut short once it is below `least`: then it is at
    most the share that is returned."""
    return attained(
        cell.part, copies, cell.seed, cell.targets, fleet=cell.fleet, entry=cell.entry, least=least
    )


def curve_of(cell: Cell, least: float) -> Curve:
    """Return the cell's curve, which below `least` is a bound."""
    return Curve(lambda copies: in_time(cell, copies, least))


class Limits:
    """What no scheduler can exceed on a cell's window (`sim.bound`), in copies of it."""

    def __init__(self, cell: Cell, part: Window) -> None:
        self._cell, self._part = cell, part
        self._engine = engine_of(cell.fleet, part.block_tokens)

    def sustained(self, target: float) -> float:
        """In the long run: without the time that a short window leaves after its last arrival."""
        least_s = self._needs(1.0).least_s(target)
        return NUM_INSTANCES * self._part.duration_s / least_s

    def ever(self, target: float) -> float:
        """On the very window that is measured, idle before and after."""

        def share(copies: float) -> float:
            return float(self._needs(copies).can_ever_be(target, NUM_INSTANCES))

        return highest(share, 1.0, self.guess, EVER_PRECISION, EVER_STEPS) * EVER_PRECISION

    @property
    def guess(self) -> float:
        """Where a search begins: about what the GPUs have time for when none misses who could hold."""
        return self.sustained(_TIME_FOR) or 1.0

    def _needs(self, copies: float) -> Needs:
        work = self._part.jobs(copies, self._cell.seed, self._cell.targets)
        return Needs(work, self._engine, self._part.block_tokens)


def limits_of(cell: Cell) -> Limits | None:
    """Return the cell's bounds. Sessions have none, since their turns come when others have ended."""
    part = cell.part
    return Limits(cell, part) if isinstance(part, Window) else None


def run_all(
    work: Callable[[T], R], todo: Sequence[T], *, processes: int = 1, ends_at: float = float("inf")
) -> Iterator[R]:
    """Yield what `work` returns of all `todo` while there is time, in any order."""
    with ExitStack() as stack:
        found: Iterator[R] = map(work, todo)
        if processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(processes))
            found = pool.imap_unordered(work, todo)
        for one in track(found, total=len(todo)):
            yield one
            if time.monotonic() > ends_at:
                return


def is_due(known: Mapping[str, object] | None, *, again: bool) -> bool:
    """Return whether a cell is to be run: it is not known or, with `again`, other code made it."""
    return known is None or (again and known.get("code") != code())


@cache
def code() -> str:
    """Return a name of the code that decides what a cell says."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in deciding_files())).hexdigest()[:8]


def deciding_files() -> list[Path]:
    """Return what is compiled, the simulation, and what the former and the coarse simulation import of the other rooms."""
    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    decides = {root / name for name in settings["tool"]["baton"]["compiled"]["modules"]}
    decides.update(root.glob("sim/coarse/*.py"))
    imported = (
        root / f"{node.module.replace('.', '/')}.py"
        for file in decides
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
    )
    return sorted({*decides, *root.glob("sim/**/*.py"), *(file for file in imported if file.exists())})
