"""The program that runs in a peer's environment: a command in JSON a line on stdin, an answer a line on stdout.

    python -m benchmarks.cpu.child PEER

It imports nothing but Python's own library before the peer's module does."""

import gc
import importlib
import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu.peers import Loaded, Peer, Stamp, Unsupported, random_tokens

Answer = dict[str, Any]
WINDOW = 8
"""Steps whose time is one measurement; of several the least counts."""


class Child:
    def __init__(self, peer: Peer) -> None:
        self._peer, self._rng = peer, random.Random(os.getpid())
        self._loaded: Loaded | None = None

    def prepare(self, checkpoint: str, target: str, bits: int) -> Answer:
        self._peer.prepare(Path(checkpoint), Path(target), bits)
        return {}

    def load(self, checkpoint: str, target: str, bits: int, threads: int) -> Answer:
        self._loaded = self._peer.load(Path(checkpoint), Path(target), bits, threads)
        gc.collect()
        names = "format", "version", "instructions"
        return {name: getattr(self._loaded, name) for name in names}

    def prefill(self, tokens: int, times: int = 2) -> Answer:
        """The first of several is cold: buffers of this length are made, and some engines compile for it."""
        engine = self._engine()
        pairs = [engine.prefill(random_tokens(self._rng, tokens)) for _ in range(times)]
        return _least([(_since(*pair), tokens) for pair in pairs])

    def decode(self, batch: int, context: int, steps: int) -> Answer:
        prompts = [random_tokens(self._rng, context) for _ in range(batch)]
        stamps = self._engine().decode(prompts, steps)
        width = min(WINDOW, steps)
        windows = [
            _since(stamps[at], stamps[at + width]) for at in range(0, len(stamps) - width, max(1, width // 2))
        ]
        return _least([(window, batch * width) for window in windows])

    def memory(self) -> Answer:
        """What this process has had at the most, and has now, in MB: its own, and of files that others may map as well."""
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            name: round(int(lines[field].split()[0]) * 1024 / 1e6, 1)
            for name, field in (
                *(("peak_mb", "VmHWM"), ("resident_mb", "VmRSS")),
                *(("anonymous_mb", "RssAnon"), ("file_mb", "RssFile")),
            )
        }

    def forget_peak(self) -> Answer:
        """Have `memory`'s peak be that from now on."""
        Path("/proc/self/clear_refs").write_text("5")
        return {}

    def _engine(self) -> Any:
        assert self._loaded, "load comes first"
        return self._loaded.engine


def _since(start: Stamp, end: Stamp) -> Stamp:
    return Stamp(end.wall_s - start.wall_s, end.cpu_s - start.cpu_s)


def _least(taken: list[tuple[Stamp, int]]) -> Answer:
    """The least of each kind of seconds, which need not be of one measurement, for so many tokens."""
    return {
        "tokens": taken[0][1],
        "wall_s": min(stamp.wall_s for stamp, _ in taken),
        "cpu_s": min(stamp.cpu_s for stamp, _ in taken),
    }


def main() -> None:
    # What libraries print goes where errors go: the answers have the real stdout to themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    child = Child(importlib.import_module(f"benchmarks.cpu.peers.{sys.argv[1]}"))  # type: ignore[arg-type]
    does: dict[str, Callable[..., Answer]] = {
        "prepare": child.prepare,
        "load": child.load,
        "prefill": child.prefill,
        "decode": child.decode,
        "memory": child.memory,
        "forget_peak": child.forget_peak,
    }
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = does[command.pop("op")](**command)
        except Unsupported as reason:
            answer = {"unsupported": str(reason)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    # Engines' own threads and processes need not be asked: the process ends.
    os._exit(0)


if __name__ == "__main__":
    main()
