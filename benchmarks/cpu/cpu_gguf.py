"""A GGUF file of llama.cpp's Q4_K_M: Baton with it, Baton with the same weights in 16 bits, and llama.cpp with it.

    python -m benchmarks.cpu.cpu_gguf [--json FILE] [--environments build/cpu-peers] [--checkpoints build/cpu-checkpoints]
        [--shape 0.5b-k] [--threads 1] [--rounds 4] [--smoke]

Earlier versions of Baton kept such a file in 16 bits. All take turns, and the least time of all rounds counts, since others may
share the machine. `decode` is a step of one sequence after a prompt of 128 tokens, `prefill` a prompt of 512 tokens. llama.cpp
quantises the file itself. `--smoke` takes a tiny model, in Q4_0 where llama.cpp is not installed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.cpu.children import ChildProcess, Children, Place
from benchmarks.cpu.install import python_of
from benchmarks.cpu.shapes import SHAPES
from benchmarks.report import parser, write
from tests.models.gguf_files import write_checkpoint

PREDICTION = (
    "Baton decodes 1.8 to 2.5 times as fast with Q4_K_M as in 16 bits, and takes 0.5 times the memory; llama.cpp, whose kernels "
    "add up whole super-blocks, is up to 1.3 times as fast with it"
)
_BITS: Final = 5
"""What `benchmarks.cpu.peers.llama_cpp` calls Q4_K_M."""
WAYS: Final = ("Baton, Q4_K_M", "Baton, 16 bits", "llama.cpp, Q4_K_M")
_CELLS: Final[dict[str, dict[str, Any]]] = {
    "decode": {"batch": 1, "context": 128, "steps": 48},
    "prefill": {"tokens": 512},
}


class Measurement:
    def __init__(self, environments: Path, checkpoint: Path, threads: int) -> None:
        self._environments, self._checkpoint, self._threads = environments, checkpoint, threads
        self._file = checkpoint.parent / "llama_cpp-5" / "Q4_K_M.gguf"
        self.ways = [way for way in WAYS if python_of(environments, _peer(way)) is not None]
        self._children = Children(self._load, len(self.ways))
        self.versions = dict[str, str]()

    def prepare(self) -> None:
        """Have the files that are missing written."""
        if not self._checkpoint.exists():
            shape = self._checkpoint.parent.name
            command = [sys.executable, "-m", "benchmarks.cpu.shapes", shape, str(self._checkpoint)]
            subprocess.run(command, check=True)
        if not self._file.exists() and WAYS[2] not in self.ways:
            self._file.parent.mkdir(exist_ok=True)
            write_checkpoint(
                self._file, self._checkpoint, "Q4_0", SHAPES[self._checkpoint.parent.name].family
            )
        if not self._file.exists():
            self._file.parent.mkdir(exist_ok=True)
            child = self._start("llama_cpp")
            about = {"checkpoint": str(self._checkpoint), "target": str(self._file.parent)}
            try:
                child.ask("prepare", bits=_BITS, **about)
            finally:
                child.end()

    def rounds(self, count: int) -> dict[str, dict[str, float]]:
        """Return, by way, the least seconds of each cell, and the memory, in MB."""
        found: dict[str, dict[str, float]] = {way: {} for way in self.ways}
        try:
            for _ in range(count):
                for cell, arguments in _CELLS.items():
                    for way in self.ways:
                        self._note(found[way], way, cell, arguments)
            for way in self.ways:
                memory = self._children.get(way).ask("memory")
                found[way] |= {name: memory[name] for name in ("resident_mb", "peak_mb")}
        finally:
            self._children.end()
        return found

    def _note(self, found: dict[str, float], way: str, cell: str, arguments: dict[str, Any]) -> None:
        answer = self._children.get(way).ask(cell, **arguments)
        for clock in ("wall_s", "cpu_s"):
            name, each = f"{cell}_{clock}", answer[clock] / answer["tokens"]
            found[name] = min(found.get(name, each), each)
        print(f"{way:20} {cell:8} {answer['tokens'] / answer['wall_s']:9.1f} tokens/s", flush=True)

    def _load(self, way: str) -> ChildProcess:
        child = self._start(_peer(way))
        is_whole, own = way == WAYS[1], way != WAYS[2]
        source = (
            self._checkpoint if not own else self._checkpoint.with_suffix(".gguf") if is_whole else self._file
        )
        try:
            about = {"checkpoint": str(source), "target": str(self._file.parent), "threads": self._threads}
            loaded = child.ask("load", bits=16 if own else _BITS, **about)
            child.ask("prefill", tokens=16, times=1)
        except BaseException:
            child.end()
            raise
        self.versions[way] = loaded["version"]
        return child

    def _start(self, peer: str) -> ChildProcess:
        python = python_of(self._environments, peer)
        assert python, "ways are those that are installed"
        environment = {"BATON_PACKED_CACHE": "none"}
        return ChildProcess(
            Place(peer, python, self._threads, self._checkpoint.parent / f"{peer}.log", environment)
        )


def _peer(way: str) -> str:
    return "llama_cpp" if way == WAYS[2] else "baton"


def ratios(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the first way relative to each other one: speeds, of which more is better, and memory."""
    first = found[WAYS[0]]
    return {
        f"{WAYS[0]} / {way}": {
            "decode speed": round(other["decode_wall_s"] / first["decode_wall_s"], 3),
            "prefill speed": round(other["prefill_wall_s"] / first["prefill_wall_s"], 3),
            "resident memory": round(first["resident_mb"] / other["resident_mb"], 3),
        }
        for way, other in found.items()
        if way != WAYS[0]
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--environments", type=Path, default=Path("build/cpu-peers"))
    options.add_argument("--checkpoints", type=Path, default=Path("build/cpu-checkpoints"))
    options.add_argument("--shape", default="0.5b-k")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=4)
    args = options.parse_args()
    shape, rounds = ("tiny", 1) if args.smoke else (args.shape, args.rounds)
    if not args.smoke and python_of(args.environments, "llama_cpp") is None:
        options.error("llama.cpp is not installed: python -m benchmarks.cpu.install --peers llama_cpp")
    measurement = Measurement(args.environments, args.checkpoints.absolute() / shape / "plain", args.threads)
    measurement.prepare()
    found = measurement.rounds(rounds)
    made = ratios(found)
    print(json.dumps(made, indent=2))
    about = {
        "prediction": PREDICTION,
        "shape": shape,
        "threads": args.threads,
        "versions": measurement.versions,
    }
    write(args.json, "benchmarks.cpu.cpu_gguf", {**about, "measured": found, "ratios": made})


if __name__ == "__main__":
    main()
