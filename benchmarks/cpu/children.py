"""The runner's side of the children: starts them, asks them, and lets one of them work at a time."""

import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.cpu.child import Answer

_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 900.0


class ChildFailed(Exception):
    """The peer could not do what was asked; the text says why, in its own words."""


class ChildRefused(Exception):
    """The peer has no such precision."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a child runs."""

    peer: str
    python: Path
    threads: int
    log: Path
    """What the peer prints."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


class ChildProcess:
    """One child in a process group of its own, on as many processors as it has threads."""

    def __init__(self, place: Place) -> None:
        self._place = place
        cores = sorted(os.sched_getaffinity(0))[: place.threads]
        threads = str(place.threads)
        environment = (
            os.environ
            | dict(place.environment)
            | {
                "OMP_NUM_THREADS": threads,
                "MKL_NUM_THREADS": threads,
                "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
            }
        )
        # vLLM asks for the OpenMP of its own environment.
        openmp = place.python.parents[1] / "lib" / "libiomp5.so"
        if openmp.exists():
            environment["LD_PRELOAD"] = str(openmp)
        for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
            environment.pop(name, None)
        place.log.parent.mkdir(parents=True, exist_ok=True)
        with place.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["taskset", "-c", f"{cores[0]}-{cores[-1]}", str(place.python), "-m", "benchmarks.cpu.child", place.peer],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                cwd=_ROOT, env=environment, start_new_session=True,
            )  # fmt: skip

    def ask(self, op: str, **arguments: Any) -> Answer:
        """Raises ChildFailed and ChildRefused."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        line = self._answer()
        if not line:
            said = self._place.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ChildFailed(f"{self._place.peer} ended during {op}: {' '.join(said)}")
        answer = json.loads(line)
        if "unsupported" in answer:
            raise ChildRefused(answer["unsupported"])
        if "error" in answer:
            raise ChildFailed(answer["error"])
        return answer

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            with suppress(BrokenPipeError):
                pipe.close()

    def _answer(self) -> bytes:
        stdout: IO[bytes] | None = self._process.stdout
        assert stdout
        ready, _, _ = select.select([stdout], [], [], _PATIENCE_S)
        return stdout.readline() if ready else b""

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class Children:
    """At most `capacity` children with a model; the one that was asked least recently makes room. All but one are stopped."""

    def __init__(self, start: Callable[[Any], ChildProcess], capacity: int) -> None:
        self._start, self._capacity = start, capacity
        self._running: dict[Any, ChildProcess] = {}

    def get(self, key: Any) -> ChildProcess:
        """The child of `key`, at work, started now if there is none. Raises what `start` does."""
        child = self._running.pop(key, None)
        for other in self._running.values():
            other.pause()
        if child is None:
            while len(self._running) >= self._capacity:
                self.drop(next(iter(self._running)))
            child = self._start(key)
        else:
            child.go_on()
        self._running[key] = child
        return child

    def drop(self, key: Any) -> None:
        if child := self._running.pop(key, None):
            child.end()

    def end(self) -> None:
        for key in list(self._running):
            self.drop(key)
