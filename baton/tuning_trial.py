"""What another tuning would have changed of recorded traffic: where requests go, and how many are in time.

Places are exact. A scheduler replays the recorded events and decides as before; at each placement a shadow policy returns the
place that it would choose. Shares in time are simulated, because other places lead to other loads: the recorded requests run on
the recorded fleet, once with each tuning."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.bench.recorded_trace import RecordedRequest, Recording, read_recording
from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.recorded_scheduler import replay
from core.kv import block_hashes, num_blocks_for
from core.scheduler_tuning import SchedulerTuning, tuned
from core.types import STANDARD, Request, SamplingParams
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.coarse.world import simulate
from sim.outcome_report import attainment, served_job
from sim.recorded_fleet import recorded_fleet

_UNSHARED_BLOCK_TOKENS = 64
"""The simulated block size where prompts have no hashes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTrial:
    """What becomes of the requests of one class. Shares are of `num_requests`, simulated."""

    name: str
    num_requests: int
    num_elsewhere: int
    """Placements that would have gone elsewhere, or would have waited."""
    now_share: float
    """In time with the recorded tuning."""
    then_share: float
    """In time with the other one."""


def try_tuning(
    path: Path, changes: Mapping[str, float], advanced: Callable[[int, int], None] = lambda done, of: None
) -> list[ClassTrial]:
    """Return what `changes` would have meant for each class, the one with most requests first. `advanced` hears how many arrivals
    of how many were simulated. Raises ConfigError."""
    recording = read_recording(path, with_peers=True)
    now = tuned(recording.config.tuning)
    then = tuned(changes, now)
    elsewhere = _elsewhere(recording, replay(path, changes)[1])
    total = 2 * len(recording.requests)
    before = _attained(recording, now, lambda count: advanced(count, total))
    after = _attained(recording, then, lambda count: advanced(total // 2 + count, total))
    sizes = Counter(one.place.slo.name for one in recording.requests.values())
    return [
        ClassTrial(
            name=name,
            num_requests=count,
            num_elsewhere=elsewhere[name],
            now_share=before[name],
            then_share=after[name],
        )
        for name, count in sizes.most_common()
    ]


def _elsewhere(recording: Recording, decisions: Iterable[str]) -> Counter[str]:
    """Count by class the placements that differ from the shadow's line behind them, or have none since it would wait."""
    found, places = Counter[str](), dict[str, str]()
    for line in decisions:
        kind, key, *route = line.split()
        if kind == "place":
            places[key] = " ".join(route)
        elif kind == "shadow" and places.get(key) == " ".join(route):
            del places[key]
    for key in places:
        if (one := recording.requests.get(key.rpartition("#")[0])) is not None:
            found[one.place.slo.name] += 1
    return found


def _attained(
    recording: Recording, tuning: SchedulerTuning, advanced: Callable[[int], None]
) -> dict[str, float]:
    """Return the share of each class that is in time in a simulation of the recording."""
    requests = sorted(recording.requests.values(), key=lambda one: one.arrived_at)
    size = recording.block_tokens if recording.block_tokens > 1 else _UNSHARED_BLOCK_TOKENS
    config = recorded_fleet(
        recording.instances,
        recording.steps,
        recording.config,
        size,
        asked_tokens=[one.place.max_new_tokens for one in requests],
        tuning=tuning,
    )
    jobs = list(_jobs(requests, size))
    simulate(config, jobs, lambda schedule, log: GlobalScheduler(schedule, log=log, tuning=tuning), advanced)
    by_class: dict[str, list[SimulatedRequest]] = defaultdict(list)
    for job in jobs:
        by_class[job.request.slo.name].append(job)
    return {name: attainment([served_job(job) for job in own], STANDARD) for name, own in by_class.items()}


def _jobs(requests: list[RecordedRequest], block_tokens: int) -> Iterator[SimulatedRequest]:
    numbers, counted = dict[int, int](), itertools.count(1)
    start_at = requests[0].arrived_at
    for number, one in enumerate(requests):
        place = one.place
        shared = [numbers.setdefault(block, next(counted)) for block in place.block_hashes]
        num_own = num_blocks_for(place.num_tokens, block_tokens) - len(shared)
        ids = (*shared, *itertools.islice(counted, num_own))
        request = Request(
            id=f"r{number}",
            prompt=(),
            sampling=SamplingParams(max_tokens=one.num_output_tokens),
            reply_to="",
            slo=place.slo,
            arrival_at=one.arrived_at - start_at,
            tenant=place.tenant,
            weight=place.weight,
        )
        hashes = block_hashes(ids[: place.num_tokens // block_tokens], 1)
        yield SimulatedRequest(request=request, ids=ids, hashes=hashes, num_prompt=place.num_tokens)
