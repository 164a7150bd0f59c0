"""What a run has found: one file, written after each measurement, from which a stopped run goes on."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.bench_report import machine
from benchmarks.cpu.limits import Limits, merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one peer is loaded for."""

    peer: str
    shape: str
    threads: int
    bits: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing that is measured."""

    op: str
    """`prefill`, `decode` or `memory`."""
    size: int = 0
    """Tokens of the prompt, or sequences."""

    @property
    def name(self) -> str:
        return f"{self.op} {self.size}" if self.size else self.op


class Record:
    def __init__(self, path: Path | None, command: str, resume: bool) -> None:
        self._path = path
        if resume and path and path.exists():
            self.content: dict[str, Any] = json.loads(path.read_text())
        else:
            self.content = {"peers": {}, "left_out": [], "limits": [], "cells": []}
        self.content = {"command": f"python -m {command}", "machine": machine(), **self.content}

    def rounds(self, setting: Setting, cell: Cell) -> int:
        row = self._row("cells", **_fields(setting), cell=cell.name)
        return row["rounds"] if row else 0

    def left_out(self, setting: Setting) -> bool:
        return any(
            row["peer"] == setting.peer and row.get("bits", setting.bits) == setting.bits
            for row in self.content["left_out"]
        )

    def leave_out(self, peer: str, reason: str, **where: Any) -> None:
        if not self._row("left_out", peer=peer, **where):
            self.content["left_out"].append({"peer": peer, **where, "reason": reason})
            self._write()

    def add(self, setting: Setting, cell: Cell, about: Mapping[str, str], answer: dict[str, Any]) -> None:
        """Seconds are the least of all rounds, memory the most. `about`: the weights' format, and which kernels multiply."""
        row = self._own_row("cells", {**about, "rounds": 0}, **_fields(setting), cell=cell.name)
        row["rounds"] += 1
        for name, value in answer.items():
            keep = min if name.endswith("_s") else max
            row[name] = keep(value, row.get(name, value))
        if "wall_s" in row:
            row["tokens_per_s"] = round(row["tokens"] / row["wall_s"], 2)
            row["tokens_per_cpu_s"] = round(row["tokens"] / row["cpu_s"], 2)
        self._write()

    def add_limits(self, threads: int, found: Limits) -> None:
        row = self._own_row("limits", {}, threads=threads)
        row |= merged(row, found)
        self._write()

    def add_version(self, peer: str, version: str) -> None:
        self.content["peers"][peer] = version

    def cells(self, **wanted: Any) -> Iterator[dict[str, Any]]:
        return (row for row in self.content["cells"] if wanted.items() <= row.items())

    def limits(self, threads: int) -> Limits:
        row = self._row("limits", threads=threads)
        assert row, "limits are measured first"
        return row

    def _row(self, part: str, **wanted: Any) -> dict[str, Any] | None:
        return next((row for row in self.content[part] if wanted.items() <= row.items()), None)

    def _own_row(self, part: str, more: dict[str, Any], **key: Any) -> dict[str, Any]:
        """The row of `key`, made with `more` beside it if there is none."""
        if (row := self._row(part, **key)) is None:
            self.content[part].append(row := {**key, **more})
        return row

    def _write(self) -> None:
        if self._path:
            self._path.write_text(json.dumps(self.content, indent=1) + "\n")


def _fields(setting: Setting) -> dict[str, Any]:
    return {
        "peer": setting.peer,
        "shape": setting.shape,
        "threads": setting.threads,
        "bits": setting.bits,
    }
