"""What is sent and when: prompts as token ids or texts, output lengths, and arrival times."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.traces import TraceRow
from core.errors import ConfigError

_WORDS = """
return self value index result name path data line print class import string number list object test error file time
open read write close key item count range length first last next type none true false with while for if else try
""".split()  # noqa: SIM905  (easier to read than forty quoted words)


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `prompt` is a text, token ids, or chat messages; `arrival_s` counts from the start."""

    prompt: Any
    max_tokens: int
    arrival_s: float = 0.0


def synthetic(
    count: int, input_tokens: int, output_tokens: int, spread: float, vocab_size: int, seed: int
) -> list[Job]:
    """Random prompts, lengths uniform within +-`spread` (a fraction). Token ids when the vocabulary is known, else words."""
    rng = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, round(mean * (1 + spread * (2 * rng.random() - 1))))

    return [Job(_prompt(rng, length(input_tokens), vocab_size), length(output_tokens)) for _ in range(count)]


def from_file(path: Path, count: int, output_tokens: int) -> list[Job]:
    """A text prompt per line, or JSON lines with `prompt` or `messages`; repeated until there are `count`."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read the prompts {path}: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"the prompt file {path} is empty")
    prompts = [_parse_line(line) for line in lines]
    return [Job(prompts[i % len(prompts)], output_tokens) for i in range(count)]


def from_trace(
    rows: Sequence[TraceRow],
    count: int,
    time_scale: float,
    max_input: int,
    max_output: int,
    vocab_size: int,
    seed: int,
) -> list[Job]:
    """The trace's own lengths (cut to the limits), shared prefixes and arrivals, stretched by `time_scale`."""
    rng = random.Random(seed)
    return [
        Job(
            _trace_prompt(row, min(row.input_tokens, max_input), vocab_size, rng),
            max(1, min(row.output_tokens, max_output)),
            row.arrival_s * time_scale,
        )
        for row in rows[:count]
    ]


def poisson_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times of a renewal process of `rate` per second; gamma gaps with squared variation `burstiness` (1: Poisson)."""
    rng = random.Random(seed)
    now, times = 0.0, []
    for _ in range(count):
        now += rng.gammavariate(1 / burstiness, burstiness / rate)
        times.append(now)
    return times


def _parse_line(line: str) -> Any:
    if not line.lstrip().startswith("{"):
        return line
    item = json.loads(line)
    return item.get("messages") or item["prompt"]


def _prompt(rng: random.Random, length: int, vocab_size: int) -> Any:
    if vocab_size:
        return [rng.randrange(4, vocab_size) for _ in range(length)]
    return " ".join(rng.choice(_WORDS) for _ in range(length))


def _trace_prompt(row: TraceRow, length: int, vocab_size: int, rng: random.Random) -> Any:
    pieces: Iterator[Any] = (
        _prompt(random.Random(f"prefix {prefix}"), row.prefix_block_tokens, vocab_size)
        for prefix in row.prefix_ids
    )
    if vocab_size:
        ids: list[int] = [token for piece in pieces for token in piece][:length]
        return ids + _prompt(rng, length - len(ids), vocab_size)
    words: list[str] = [word for piece in pieces for word in piece.split()][:length]
    return " ".join(words + [rng.choice(_WORDS) for _ in range(length - len(words))])
