"""What a live scheduler recorded, as a load: times, lengths and shared blocks, without any text."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.scheduler.recorded_scheduler import read
from cluster.scheduler.scheduler_events import Event, PeerLost, RequestArrived, RequestLeft
from core.config.cluster_config import ScheduleConfig
from core.cost.steps import UNKNOWN_STEPS, StepModels
from core.errors import ConfigError
from core.messages import Finished, PlacedByPeer, PlaceRequest, ReleasedByPeer
from core.reports import LoadReport, Register


@dataclass(slots=True)
class RecordedRequest:
    arrived_at: float
    place: PlaceRequest
    """As it came first."""
    num_output_tokens: int = 0
    """The tokens of all its attempts."""


@dataclass(slots=True)
class Recording:
    config: ScheduleConfig
    requests: dict[str, RecordedRequest] = field(default_factory=dict)
    """By id, those that ended with an answer."""
    instances: Mapping[str, Register] = field(default_factory=dict)
    """By address, those of the moment when there were most."""
    steps: dict[str, StepModels] = field(default_factory=dict)
    """By address, what each had learned of its steps in the end."""
    block_tokens: int = 1
    """The tokens of the blocks that hashes are of. Instances may have others."""


def read_recording(path: Path, *, with_peers: bool = False) -> Recording:
    """Read the load and the fleet. `with_peers`: with requests that the cluster's other schedulers placed. Raises ConfigError."""
    config, items = read(path)
    found, living = Recording(config), dict[str, Register]()
    for item in items:
        if isinstance(item, str):
            continue
        event, now = item
        _note_fleet(found, living, event)
        _note_load(found.requests, event, now, with_peers=with_peers)
    found.requests = {name: one for name, one in found.requests.items() if one.num_output_tokens}
    if not found.requests:
        raise ConfigError(f"{path}: no request in it has an answer")
    found.block_tokens = _block_tokens([*found.requests.values()], found.instances.values())
    return found


def _note_fleet(found: Recording, living: dict[str, Register], event: Event) -> None:
    match event:
        case Register():
            living[event.address] = event
            if len(living) > len(found.instances):
                found.instances = dict(living)
        case PeerLost(address):
            living.pop(address, None)
        case LoadReport() if event.steps != UNKNOWN_STEPS:
            found.steps[event.address] = event.steps
        case _:
            pass


def _note_load(requests: dict[str, RecordedRequest], event: Event, now: float, *, with_peers: bool) -> None:
    match event:
        case RequestArrived():
            requests.setdefault(event.place.request_id, RecordedRequest(now, event.place))
        case PlacedByPeer() if with_peers:
            requests.setdefault(event.place.request_id, RecordedRequest(now, event.place))
        case RequestLeft(ended=ended) if ended.request_id in requests:
            requests[ended.request_id].num_output_tokens += ended.num_output_tokens
        case Finished() | ReleasedByPeer() if event.request_id in requests:
            requests[event.request_id].num_output_tokens += event.num_output_tokens
        case _:
            pass


def write_trace(recording: Path, trace: Path) -> int:
    """Write the requests that ended as JSON lines, which `baton.bench.traces` reads. Returns their number.

    A request that another scheduler placed is in that one's recording. Raises ConfigError."""
    found = read_recording(recording)
    lines = _lines([*found.requests.values()], found.block_tokens)
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return len(found.requests)


def _block_tokens(requests: Sequence[RecordedRequest], instances: Iterable[Register]) -> int:
    places = [one.place for one in requests]
    sizes = sorted({info.block_size for info in instances})
    fitting = (s for s in sizes if all(p.num_tokens // s == len(p.block_hashes) for p in places))
    return next(fitting, 1)


def _lines(requests: list[RecordedRequest], block_size: int) -> Iterator[dict[str, Any]]:
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
