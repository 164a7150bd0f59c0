"""Reads request traces of four kinds into one form: arrival, input and output length, and which prefix blocks are shared.

Mooncake and ShareGPT: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`. Azure: CSV with TIMESTAMP,
ContextTokens, GeneratedTokens. ServeGen: CSV with arrival_s, input_tokens, output_tokens. Each plain or gzipped."""

import csv
import gzip
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TraceRow:
    arrival_s: float
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks: equal leading ids mean equal leading text."""
    prefix_block_tokens: int = 0


def read_trace(path: Path, seed: int = 0) -> list[TraceRow]:
    """Rows in order of arrival, the first at 0 s. Raises ConfigError for a file of no known kind."""
    try:
        text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"the trace {path} is empty")
    try:
        rows = _json_rows(lines, seed) if lines[0].lstrip().startswith("{") else _csv_rows(lines)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"the trace {path} is of no known format: {type(error).__name__} {error}") from None
    rows.sort(key=lambda row: row.arrival_s)
    start = rows[0].arrival_s
    return [replace(row, arrival_s=row.arrival_s - start) for row in rows]


def _json_rows(lines: Iterable[str], seed: int) -> list[TraceRow]:
    raw = [json.loads(line) for line in lines]
    longest = max((item["input_length"] / max(1, len(item.get("hash_ids", ()))) for item in raw), default=0)
    block = 16 if longest <= 16 else 512
    rows = [
        TraceRow(
            item["timestamp"] / 1000,
            item["input_length"],
            item["output_length"],
            tuple(item.get("hash_ids", ())),
            block,
        )
        for item in raw
    ]
    return _spread(rows, seed)


def _spread(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """Mooncake's timestamps are multiples of 3 s: spread each group over the time until the next."""
    times = sorted({row.arrival_s for row in rows})
    if len(times) < 2 or len(times) > len(rows) // 2:
        return rows
    step_s = min(later - earlier for earlier, later in pairwise(times))
    rng = random.Random(seed)
    return [replace(row, arrival_s=row.arrival_s + rng.random() * step_s) for row in rows]


def _csv_rows(lines: Iterable[str]) -> list[TraceRow]:
    reader = csv.DictReader(lines)
    if "TIMESTAMP" in (reader.fieldnames or ()):
        return [
            TraceRow(_timestamp_s(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in reader
        ]
    return [
        TraceRow(float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"]))
        for row in reader
    ]


def _timestamp_s(text: str) -> float:
    """Azure writes seven digits of a second; Python reads six."""
    head, _, fraction = text.partition(".")
    return datetime.fromisoformat(f"{head}+00:00").timestamp() + float(f"0.{fraction or 0}")
