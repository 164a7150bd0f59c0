"""Makes a trace of what a live scheduler recorded: times, lengths and shared blocks, without any text."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.scheduler.recorded_scheduler import read
from cluster.scheduler.scheduler_events import RequestArrived
from core.errors import ConfigError
from core.messages import Finished, PlaceRequest
from core.reports import Register


@dataclass(slots=True)
class _Request:
    arrived_at: float
    place: PlaceRequest
    """As it came first."""
    num_output_tokens: int = 0
    """The tokens of all its attempts."""


def write_trace(recording: Path, trace: Path) -> int:
    """Write the requests that ended as JSON lines, which `baton.bench.traces` reads. Returns their number.

    A request that another scheduler placed is in that one's recording. Raises ConfigError."""
    block_sizes: set[int] = set()
    requests: dict[str, _Request] = {}
    _, items = read(recording)
    for item in items:
        if isinstance(item, str):
            continue
        event, now = item
        if isinstance(event, Register):
            block_sizes.add(event.block_size)
        elif isinstance(event, RequestArrived):
            requests.setdefault(event.place.request_id, _Request(now, event.place))
        elif isinstance(event, Finished) and event.request_id in requests:
            requests[event.request_id].num_output_tokens += event.num_output_tokens
    ended = [one for one in requests.values() if one.num_output_tokens]
    if not ended:
        raise ConfigError(f"{recording}: no request in it has an answer")
    size = _block_size(ended, block_sizes)
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in _lines(ended, size)))
    return len(ended)


def _block_size(requests: list[_Request], sizes: set[int]) -> int:
    """Return the tokens of the blocks that hashes are of. Instances may have others."""
    places = [one.place for one in requests]
    fitting = (s for s in sorted(sizes) if all(p.num_tokens // s == len(p.block_hashes) for p in places))
    return next(fitting, 1)


def _lines(requests: list[_Request], block_size: int) -> Iterator[dict[str, Any]]:
    numbers: dict[int, int] = {}
    start_at = min(one.arrived_at for one in requests)
    for one in sorted(requests, key=lambda one: one.arrived_at):
        blocks = [numbers.setdefault(found, len(numbers)) for found in one.place.block_hashes]
        yield {
            "timestamp": (one.arrived_at - start_at) * 1000,
            "input_length": one.place.num_tokens,
            "output_length": one.num_output_tokens,
            "hash_ids": blocks,
            "block_tokens": block_size,
            "client": one.place.tenant,
        }
