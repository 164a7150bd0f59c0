"""What is done to the processes of a soak, one fault after the other.

Some processes are never killed, so that what they hold can be watched: they are stopped, cut off, and short of disk, memory,
descriptors and right clocks like the others. What a machine does not allow is left out, and the report says so."""

import asyncio
import contextlib
import os
import random
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.cases import KINDS, MESSAGES
from tests.chaos.databases import Database
from tests.chaos.world import Process, World
from tests.processes import command

SURVIVORS = ("ingress1", "scheduler1", "decode0")
"""They are never killed."""
_MORTALS = ("ingress0", "scheduler0", "prefill0", "decode1")
_WITH_RANKS = "decode1"
_OFTEN = {"kill": 3, "stop": 3}
"""How many times as often as others some kinds of faults come."""
_INSTANCES = ("prefill0", "decode0", "decode1")
_SHORT_S, _LONG_S = 1.0, 4.0
"""A stop that nobody has to notice, and one after which peers have given the process up."""
_HOLD_S = 3.0
"""How long a shortage lasts."""
_CLOCK_STEPS_S = (-3600.0, -5.0, 30.0, 3600.0)
_WRITE_S = 0.05
_MORE_BYTES = 8 << 20
"""What a process may take more under memory pressure."""
_CGROUPS = Path("/sys/fs/cgroup")
_NOTICED_S = 20.0
"""How long it may take until an instance knows that a rank is lost. It is replaced in any case."""
_LOOKS = 200


@dataclass(slots=True)
class Happened:
    """One fault."""

    at: float
    what: str
    ended_at: float = 0.0


class Faults:
    def __init__(self, world: World, rng: random.Random, disk: "SmallDisk", database: Database) -> None:
        self._world, self._rng, self._disk, self._database = world, rng, disk, database
        self.happened: list[Happened] = []
        self.left_out: dict[str, str] = {}
        """Faults that this machine does not allow, with the reason."""
        self._kinds: dict[str, Callable[[str], Awaitable[None]]] = {
            **{f"kill {name}": self._replace for name in _MORTALS},
            **{f"stop {name}": self._stop for name in (*_MORTALS, *SURVIVORS)},
            **{f"{how} a rank of {_WITH_RANKS}": self._lose_rank for how in ("kill", "stop")},
            f"drain {_WITH_RANKS}": self._drain,
            **{f"slow KV link of {name}": self._slow for name in _INSTANCES},
            **{f"damaged KV of {name}": self._damage for name in _INSTANCES},
            "mail": self._mistreat,
            **{f"clock of {name}": self._step_clock for name in (*_MORTALS, *SURVIVORS)},
            **{f"descriptors of {name}": self._use_up_descriptors for name in SURVIVORS},
            "full disk": self._fill_disk,
            "database gone": self._lose_database,
            "database hung": self._lose_database,
            **{f"memory of {name}": self._press for name in ("prefill0", "ingress0")},
        }
        if disk.refusal:
            self._leave_out("full disk", disk.refusal)
        if refusal := _no_cgroups():
            for name in [kind for kind in self._kinds if kind.startswith("memory")]:
                self._leave_out(name, refusal)

    def _leave_out(self, kind: str, why: str) -> None:
        self.left_out[kind] = why
        del self._kinds[kind]

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(one.what for one in self.happened))

    async def one(self) -> None:
        """Do a fault of a random kind, and wait until it is over."""
        groups = sorted({name.split()[0] for name in self._kinds})
        group = self._rng.choices(groups, [_OFTEN.get(group, 1) for group in groups])[0]
        name = self._rng.choice([kind for kind in self._kinds if kind.split()[0] == group])
        fault = Happened(time.monotonic(), name)
        self.happened.append(fault)
        await self._kinds[name](name)
        fault.ended_at = time.monotonic()

    async def _replace(self, name: str) -> None:
        node = name.split()[-1]
        await self._world.kill(node)
        await self._world.start(node)

    async def _stop(self, name: str) -> None:
        node = name.split()[-1]
        self._world.freeze(node)
        await asyncio.sleep(self._rng.choice((_SHORT_S, _LONG_S)))
        self._world.thaw(node)

    async def _lose_rank(self, name: str) -> None:
        """The instance notices by itself. Ray Serve would start another one then, as this does."""
        node = self._world.nodes[_WITH_RANKS]
        ranks = [
            one
            for one in psutil.Process(node.process.pid).children()
            if "engine.ranks.rank_process" in command(one)
        ]
        if ranks:
            self._rng.choice(ranks).send_signal(signal.SIGKILL if name.startswith("kill") else signal.SIGSTOP)
            with contextlib.suppress(AssertionError, TimeoutError):
                await _has_failed(node)
        await self._replace(_WITH_RANKS)

    async def _drain(self, name: str) -> None:
        node = self._world.nodes[name.split()[-1]]
        node.do(do="drain")
        with contextlib.suppress(AssertionError, TimeoutError):
            await node.wait_for("drained", _NOTICED_S)
        await self._replace(name)

    async def _slow(self, name: str) -> None:
        node = self._world.nodes[name.split()[-1]]
        node.do(do="slow", write_s=_WRITE_S)
        await asyncio.sleep(_HOLD_S)
        node.do(do="slow", write_s=0.0)

    async def _damage(self, name: str) -> None:
        self._world.nodes[name.split()[-1]].do(do="corrupt", frames=3)

    async def _mistreat(self, _: str) -> None:
        """Lose, double, delay, reorder or cut one message of each kind that a random process sends next."""
        node = self._world.nodes[self._rng.choice([*self._world.nodes])]
        for message in MESSAGES:
            node.do(do="fate", message=message, kind=self._rng.choice(KINDS))

    async def _step_clock(self, name: str) -> None:
        node = self._world.nodes[name.split()[-1]]
        node.do(do="step clock", offset_s=self._rng.choice(_CLOCK_STEPS_S))
        await asyncio.sleep(_HOLD_S)
        node.do(do="step clock", offset_s=0.0)

    async def _use_up_descriptors(self, name: str) -> None:
        pid = self._world.nodes[name.split()[-1]].process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_highest_descriptor(pid) + 1, before[1]))
        await asyncio.sleep(_HOLD_S)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    async def _fill_disk(self, _: str) -> None:
        with self._disk.full():
            await asyncio.sleep(_HOLD_S)

    async def _lose_database(self, name: str) -> None:
        database = self._database
        async with database.gone() if name.endswith("gone") else database.hung():
            await asyncio.sleep(_HOLD_S)

    async def _press(self, name: str) -> None:
        node = name.split()[-1]
        pid = self._world.nodes[node].process.pid
        with _bounded_memory(pid, _MORE_BYTES):
            await asyncio.sleep(_HOLD_S)
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            await self._replace(node)  # the kernel has ended it


async def _has_failed(node: Process) -> None:
    """Wait until the instance knows that it has. Raises AssertionError where its process has ended, TimeoutError."""
    async with asyncio.timeout(_NOTICED_S):
        for _ in range(_LOOKS):
            if (await node.status())["failed"]:
                return
            await asyncio.sleep(_NOTICED_S / _LOOKS)


def _highest_descriptor(pid: int) -> int:
    return max(map(int, os.listdir(f"/proc/{pid}/fd")))


class SmallDisk:
    """A file system of its own, where a user may mount one. Use it in `with`."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder, self.refusal = folder, ""
        folder.mkdir(parents=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            self.refusal = f"no small disk can be mounted here: {done.stderr.strip()[:200]}"

    def __enter__(self) -> "SmallDisk":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.refusal:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)

    @contextlib.contextmanager
    def full(self) -> Any:
        """Leave no byte on it meanwhile."""
        filler = self.folder / "filler"
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        try:
            yield
        finally:
            filler.unlink()


def _limit_file(folder: Path) -> Path:
    return folder / ("memory.max" if _memory_groups() == _CGROUPS else "memory.limit_in_bytes")


def _memory_groups() -> Path:
    """Return the folder of the groups that bound memory: of control groups version 1, or else 2."""
    return _CGROUPS / "memory" if (_CGROUPS / "memory").is_dir() else _CGROUPS


def _no_cgroups() -> str:
    """Return why no group can be made; empty where one can."""
    group = _memory_groups() / f"baton-soak-{os.getpid()}"
    try:
        group.mkdir()
        there = _limit_file(group).exists()
        group.rmdir()
    except OSError as error:
        return f"no control group can be made here: {error.strerror}"
    return "" if there else "control groups here do not bound memory"


@contextlib.contextmanager
def _bounded_memory(pid: int, more_bytes: int) -> Any:
    """Have the kernel take memory back from the process, or end it, once it takes so much more."""
    group = _memory_groups() / f"baton-soak-{os.getpid()}"
    own = next(
        line.rpartition(":")[2].strip()
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        if ":memory:" in line or line.startswith("0::")
    )
    group.mkdir()
    try:
        _limit_file(group).write_text(str(more_bytes))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(OSError):  # it has ended
            (_memory_groups() / own.lstrip("/") / "cgroup.procs").write_text(str(pid))
        for _ in range(100):
            with contextlib.suppress(OSError):  # a process that ends is there for a moment
                group.rmdir()
                break
            time.sleep(0.02)
