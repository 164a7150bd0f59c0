"""What is sent and when: prompts as token ids or texts, output lengths, and arrival times.

Runs of one sweep get the same lengths but, with another `run` number, other contents. A prompt that an earlier run has sent would
be found in the server's prefix cache, and improve the figures."""

import json
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from baton.bench.traces import RateWindow, TraceRow
from core.errors import ConfigError

WARMUP_RUN = -1
_FIRST_PLAIN_ID = 4  # the ids below are special in many vocabularies
_WORDS = """
return self value index result name path data line print class import string number list object test error file time
open read write close key item count range length first last next type none true false with while for if else try
""".split()  # noqa: SIM905  (easier to read than forty quoted words)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. `prompt` is a text, token ids, or chat messages; `arrival_at` counts from the start."""

    prompt: Any
    max_tokens: int
    arrival_at: float = 0.0


def synthetic(
    count: int,
    input_tokens: int,
    output_tokens: int,
    spread: float,
    *,
    vocab_size: int,
    seed: int,
    run: int = 0,
) -> list[BenchRequest]:
    """Make random prompts, with lengths uniform within +-`spread` (a fraction): token ids when the vocabulary is known, else
    words."""
    lengths, contents = random.Random(seed), random.Random(f"contents {seed} {run}")

    def length(mean: int) -> int:
        return max(1, round(mean * (1 + spread * (2 * lengths.random() - 1))))

    return [
        BenchRequest(_prompt(_pieces(contents, length(input_tokens), vocab_size)), length(output_tokens))
        for _ in range(count)
    ]


def from_file(path: Path, count: int, output_tokens: int, run: int = 0) -> list[BenchRequest]:
    """Read one text prompt a line, or JSON lines with `prompt` or `messages`. They are repeated until there are `count`.

    Each run continues where the one before ended; the warm-up takes the file's last ones."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read the prompts {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the prompt file {path} is not UTF-8 text") from None
    if not lines:
        raise ConfigError(f"the prompt file {path} is empty")
    prompts = [_parse_line(path, number, line) for number, line in enumerate(lines, 1)]
    return [BenchRequest(prompts[(run * count + i) % len(prompts)], output_tokens) for i in range(count)]


def from_trace(
    rows: Sequence[TraceRow],
    count: int,
    time_scale: float,
    max_input: int,
    *,
    max_output: int,
    vocab_size: int,
    seed: int,
    run: int = 0,
) -> list[BenchRequest]:
    """Use the trace's own lengths (cut to the limits), shared prefixes and arrivals, stretched by `time_scale`."""
    rng = random.Random(f"contents {seed} {run}")
    blocks: dict[int, list[Any]] = {}

    def prompt(row: TraceRow) -> Any:
        length = max(1, min(row.input_tokens, max_input))
        pieces: list[Any] = []
        for block in row.prefix_ids:
            if len(pieces) >= length:
                break
            if block not in blocks:
                own = random.Random(f"block {seed} {run} {block}")
                blocks[block] = _pieces(own, row.prefix_block_tokens, vocab_size)
            pieces += blocks[block]
        return _prompt(pieces[:length] + _pieces(rng, length - len(pieces), vocab_size))

    return [
        BenchRequest(prompt(row), max(1, min(row.output_tokens, max_output)), row.arrival_at * time_scale)
        for row in rows[:count]
    ]


def poisson_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return arrival times of a renewal process of `rate` per second. Gaps are gamma with squared variation `burstiness` (1:
    Poisson)."""
    rng = random.Random(seed)
    now, times = 0.0, []
    for _ in range(count):
        now += rng.gammavariate(1 / burstiness, burstiness / rate)
        times.append(now)
    return times


def curve_arrivals(windows: Sequence[RateWindow], count: int, seed: int) -> list[float]:
    """Return `count` arrival times spread over the whole curve: a Poisson process of that shape, given its number of events."""
    ends = list(accumulate(window.rate * window.duration_s for window in windows))
    rng = random.Random(seed)
    times: list[float] = []
    for mass in sorted(rng.random() * ends[-1] for _ in range(count)):
        index = bisect_right(ends, mass)
        window = windows[index]
        times.append(window.start_at + window.duration_s - (ends[index] - mass) / window.rate)
    return times


def _parse_line(path: Path, number: int, line: str) -> Any:
    if not line.lstrip().startswith("{"):
        return line
    try:
        item = json.loads(line)
        return item.get("messages") or item["prompt"]
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"line {number} of {path} is no JSON object with prompt or messages: {error}"
        ) from None


def _pieces(rng: random.Random, length: int, vocab_size: int) -> list[Any]:
    """Return `length` token ids, or words (about a token each) where the vocabulary is not known."""
    if vocab_size:
        return [rng.randrange(_FIRST_PLAIN_ID, vocab_size) for _ in range(length)]
    return [rng.choice(_WORDS) for _ in range(length)]


def _prompt(pieces: list[Any]) -> Any:
    return " ".join(pieces) if isinstance(pieces[0], str) else pieces
