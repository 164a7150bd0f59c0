"""Reads request traces of four kinds into one form: arrival, input and output length, and which prefix blocks are shared.

- Mooncake, ShareGPT and `baton replay --trace`: JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`
- Azure: CSV with TIMESTAMP, ContextTokens, GeneratedTokens
- ServeGen: CSV with arrival_s, input_tokens, output_tokens

JSON lines and ServeGen's rows may say whose request it is: `client`. Sessions in closed loop are another matter
(`sim.agent_sessions`).

A fifth kind, ServeGen's rate curves (CSV with pool, window_start_s, aggregate_rps), has no requests in it but says how their
rate changes. Each plain or gzipped."""

import csv
import gzip
import json
import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from core.errors import ConfigError

_RATE_COLUMN = "aggregate_rps"
_SHOWN = 160
"""The most characters of a file's first line that an error shows."""
_FORMATS = (
    "There are JSON lines with timestamp (ms), input_length and output_length (Mooncake's and ShareGPT's), and CSV with the "
    "columns arrival_s, input_tokens and output_tokens (ServeGen's) or TIMESTAMP, ContextTokens and GeneratedTokens (Azure's), "
    "each plain or gzipped."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    arrival_at: float
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks: equal leading ids mean equal leading text."""
    prefix_block_tokens: int = 0
    client: str = ""
    """Who asked, where the trace says so."""


@dataclass(frozen=True, slots=True)
class RateWindow:
    """`rate` requests per second during `duration_s` from `start_at` on."""

    start_at: float
    duration_s: float
    rate: float


def read_trace(path: Path, seed: int = 0) -> list[TraceRow]:
    """Return the rows in order of arrival, the first at 0 s. Raises ConfigError for a file of no known kind."""
    lines = _lines(path)
    if _RATE_COLUMN in lines[0]:
        raise ConfigError(f"{path} holds rates, not requests: use it as --rate-curve")
    if '"session_id"' in lines[0]:
        raise ConfigError(f"{path} holds sessions, whose turns follow answers: `baton simulate` serves them")
    try:
        rows = _json_rows(lines, seed) if lines[0].lstrip().startswith("{") else _csv_rows(lines)
    except (KeyError, ValueError, TypeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"the trace {path} is of no known format: {said}. {_FORMATS} Its first line is {lines[0][:_SHOWN]!r}"
        ) from None
    if not rows:
        raise ConfigError(f"the trace {path} has no requests")
    rows.sort(key=lambda row: row.arrival_at)
    start = rows[0].arrival_at
    return [replace(row, arrival_at=row.arrival_at - start) for row in rows]


def read_rate_curve(path: Path, pool: str = "") -> list[RateWindow]:
    """Return the curve of `pool` (default: the file's first), from 0 s on. Raises ConfigError for an unknown pool or another
    file."""
    curves: dict[str, list[tuple[float, float]]] = {}
    try:
        for row in csv.DictReader(_lines(path)):
            curves.setdefault(row["pool"], []).append(
                (float(row["window_start_s"]), float(row[_RATE_COLUMN]))
            )
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no rate curve: {type(error).__name__} {error}") from None
    points = sorted(curves.get(pool or next(iter(curves), ""), ()))
    if len(points) < 2 or not any(rate > 0 for _, rate in points):
        raise ConfigError(
            f"{path} has no rates for the pool {pool!r}; its pools: {', '.join(curves) or 'none'}"
        )
    last_s = points[-1][0] - points[-2][0]
    durations_s = [*(later[0] - earlier[0] for earlier, later in pairwise(points)), last_s]
    return [
        RateWindow(start_at - points[0][0], duration_s, rate)
        for (start_at, rate), duration_s in zip(points, durations_s, strict=True)
    ]


def _lines(path: Path) -> list[str]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the trace {path}: it is not text") from None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"the trace {path} is empty")
    return lines


def _json_rows(lines: Iterable[str], seed: int) -> list[TraceRow]:
    raw = [json.loads(line) for line in lines]
    block = _block_tokens(raw)
    rows = [
        TraceRow(
            arrival_at=item["timestamp"] / 1000,
            input_tokens=item["input_length"],
            output_tokens=item["output_length"],
            prefix_ids=tuple(item.get("hash_ids", ())),
            prefix_block_tokens=block,
            client=str(item.get("client", "")),
        )
        for item in raw
    ]
    return _spread(rows, seed)


def _block_tokens(raw: Sequence[dict[str, Any]]) -> int:
    """Return the tokens of a block: what the lines say, else 512 in Mooncake's traces and 16 in ShareGPT's. The last block of a
    prompt may be partial, or left out."""
    if said := raw[0].get("block_tokens"):
        return int(said)
    item = max(raw, key=lambda item: len(item.get("hash_ids", ())))
    return 16 if item["input_length"] < 64 * len(item.get("hash_ids", ())) else 512


def _spread(rows: list[TraceRow], seed: int) -> list[TraceRow]:
    """Spread each group of equal timestamps over the time until the next, since Mooncake's are multiples of 3 s."""
    times = sorted({row.arrival_at for row in rows})
    if len(times) < 2 or len(times) > len(rows) // 2:
        return rows
    step_s = min(later - earlier for earlier, later in pairwise(times))
    rng = random.Random(seed)
    return [replace(row, arrival_at=row.arrival_at + rng.random() * step_s) for row in rows]


def _csv_rows(lines: Iterable[str]) -> list[TraceRow]:
    reader = csv.DictReader(lines)
    if "TIMESTAMP" in (reader.fieldnames or ()):
        return [
            TraceRow(
                arrival_at=_timestamp(row["TIMESTAMP"]),
                input_tokens=int(row["ContextTokens"]),
                output_tokens=int(row["GeneratedTokens"]),
            )
            for row in reader
        ]
    return [
        TraceRow(
            arrival_at=float(row["arrival_s"]),
            input_tokens=int(row["input_tokens"]),
            output_tokens=int(row["output_tokens"]),
            client=row.get("client") or "",
        )
        for row in reader
    ]


def _timestamp(text: str) -> float:
    """Parse a timestamp. Azure writes seven digits of a second; Python reads six."""
    head, _, fraction = text.partition(".")
    return datetime.fromisoformat(f"{head}+00:00").timestamp() + float(f"0.{fraction or 0}")
