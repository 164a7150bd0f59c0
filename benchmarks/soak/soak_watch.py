"""What the processes of a soak hold: memory and descriptors meanwhile, and anything at all afterwards."""

import contextlib
import os
import socket
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_SHARED = Path("/dev/shm")
_WINDOW = 0.15
"""The share of what was seen after the warm-up that counts as its beginning, and as its end."""


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    rss_bytes: int
    descriptors: int
    anonymous_bytes: int = 0
    """The part of `rss_bytes` that is of no file and shared with nobody. A library's code comes and goes with what is called."""


class Watch:
    """Collects samples of each process, by its name and id."""

    def __init__(self) -> None:
        self.samples: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
        self.pids: set[int] = set()
        """The ids of all processes that there were, and of those that they had started."""

    def look(self, processes: Iterable[tuple[str, int]], now: float) -> None:
        for name, pid in processes:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                memory = process.memory_info()
                found = Sample(now, memory.rss, process.num_fds(), memory.rss - memory.shared)
                self.samples[name, pid].append(found)
                self.pids |= {pid, *(child.pid for child in process.children(recursive=True))}


@dataclass(frozen=True, slots=True)
class Growth:
    """What a process that lived through has taken from the end of the warm-up to the end."""

    name: str
    rss_bytes: tuple[int, int]
    descriptors: tuple[int, int]
    """The most at the beginning, and the fewest at the end."""
    anonymous_bytes: tuple[int, int]

    def as_json(self) -> dict[str, Any]:
        return {
            "process": self.name,
            "rss_mib": [round(value / (1 << 20), 1) for value in self.rss_bytes],
            "anonymous_mib": [round(value / (1 << 20), 1) for value in self.anonymous_bytes],
            "rss_growth_percent": round(100 * (self.rss_bytes[1] / self.rss_bytes[0] - 1), 2),
            "most_and_fewest_descriptors": list(self.descriptors),
        }


def growth(name: str, samples: Sequence[Sample], warm_at: float) -> Growth:
    """Compare the beginning with the end: medians of memory, and the most descriptors with the fewest. Two peers have one
    connection or two, and each client has one, so their number goes up and down."""
    after = [sample for sample in samples if sample.at >= warm_at] or list(samples[-1:])
    count = max(1, round(len(after) * _WINDOW))

    def medians(values: list[int]) -> tuple[int, int]:
        return round(statistics.median(values[:count])), round(statistics.median(values[-count:]))

    descriptors = [sample.descriptors for sample in after]
    return Growth(
        name,
        medians([sample.rss_bytes for sample in after]),
        (max(descriptors[:count]), min(descriptors[-count:])),
        medians([sample.anonymous_bytes for sample in after]),
    )


class Traces:
    """What there was before, so that anything more is known afterwards."""

    def __init__(self) -> None:
        self._shared = set(os.listdir(_SHARED))

    def left(self, pids: set[int], ports: set[int], folder: Path) -> dict[str, list[str]]:
        """Return what is left of the processes of these ids, which have all been ended."""
        shared = [name for name in os.listdir(_SHARED) if name not in self._shared and _is_of(name, pids)]
        running = [one for one in psutil.process_iter() if one.pid in pids]
        return {
            "shared_memory": shared,
            "processes": [
                f"{one.pid} {one.name()}" for one in running if one.status() != psutil.STATUS_ZOMBIE
            ],
            "ports": [str(port) for port in sorted(ports) if _listens(port)],
            "unfinished_files": [str(path.relative_to(folder)) for path in folder.rglob("*.new")],
        }


def _is_of(name: str, pids: set[int]) -> bool:
    return any(str(pid) in name for pid in pids)


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
