"""Where memory goes while a CPU's model is loaded and serves, by phase, in each precision, beside llama.cpp.

    python -m benchmarks.cpu.cpu_memory [--json FILE] [--environments build/cpu-peers] [--checkpoints build/cpu-checkpoints]
        [--shape 0.5b] [--bits 16,8,4] [--threads 2] [--smoke]

`imports`: the engine's code, before it knows a model. `loading`: until the model can serve. `serving`: a prompt of 512 tokens and
16 steps of 8 sequences. Each phase has its peak (the kernel's VmHWM, set back before each phase) and what is resident at its
end, of which `anonymous` is the process's own and `file` is mapped from files. `packed_mb` is what the matrices take in the
precision. Baton is measured three times: with weights of its own (`none`), as the first that stores them, and as one that finds
them stored."""

import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.child import Answer
from benchmarks.cpu.children import ChildProcess, ChildRefused, Place
from benchmarks.cpu.install import python_of
from benchmarks.cpu.peers.baton import FORMATS
from benchmarks.cpu.shapes import SHAPES
from benchmarks.report import parser, write
from kernels.cpu.prepacked import WeightFormat, bytes_per_number

PREDICTION = (
    "of 0.8 GB beside the matrices 0.35 are imports, 0.2 KV of prompts that nobody asks for again, 0.1 kept buffers and 0.1 "
    "pages of the checkpoint; peaks while loading are 1.4 times llama.cpp's in 16 bits, 1.7 in 8 and 1.7 in 4 before, and 1.25, "
    "1.4 and 1.4 with weights from a file"
)
_WEIGHTS: dict[int, WeightFormat] = {16: "half", 8: "int8", 4: "int4"}


class Measured:
    """One engine's child, from its imports on."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self.phases: dict[str, Answer] = {"imports": child.ask("memory")}

    @contextmanager
    def phase(self, name: str) -> Generator[ChildProcess]:
        self._child.ask("forget_peak")
        yield self._child
        self.phases[name] = self._child.ask("memory")


def measure(place: Place, model: dict[str, Any], smoke: bool) -> dict[str, Answer]:
    child = ChildProcess(place)
    try:
        found = Measured(child)
        with found.phase("loading"):
            child.ask("load", **model)
        with found.phase("serving"):
            child.ask("prefill", tokens=16 if smoke else 512, times=1)
            child.ask("decode", batch=2 if smoke else 8, context=16 if smoke else 128, steps=16)
        return found.phases
    finally:
        child.end()


def packed_mb(shape: str, bits: int) -> float:
    """Return the megabytes of the matrices; the embedding is the head's."""
    numbers = SHAPES[shape].layer_numbers + SHAPES[shape].head_numbers
    return numbers * bytes_per_number(_WEIGHTS[bits], torch.float32) / 1e6


class Run:
    def __init__(self, environments: Path, checkpoints: Path, shape: str, threads: int, smoke: bool) -> None:
        self._environments, self._folder = environments, checkpoints / shape
        self._shape, self._threads, self._smoke = shape, threads, smoke
        self.rows: list[dict[str, Any]] = []
        if not (self._folder / "plain").exists():
            # A process of its own gives the memory back that this takes.
            plain = str(self._folder / "plain")
            subprocess.run([sys.executable, "-m", "benchmarks.cpu.shapes", shape, plain], check=True)

    def measure(self, bits: int) -> None:
        with tempfile.TemporaryDirectory(dir=self._folder) as cache:
            for way, setting in (("none", "none"), ("first", cache), ("found", cache)):
                self._add("baton", bits, way, self._folder, setting)
        if python_of(self._environments, "llama_cpp") is not None:
            target = self._prepared(bits)
            self._add("llama_cpp", bits, "", target)

    def _prepared(self, bits: int) -> Path:
        target = self._folder / f"llama_cpp-{bits}"
        if not target.exists():
            target.mkdir()
            child = ChildProcess(self._place("llama_cpp"))
            try:
                child.ask("prepare", checkpoint=str(self._folder / "plain"), target=str(target), bits=bits)
            except ChildRefused:
                target.rmdir()
                raise
            finally:
                child.end()
        return target

    def _place(self, peer: str, packed_cache: str = "none") -> Place:
        python = python_of(self._environments, peer)
        assert python, "it is installed"
        log = self._folder / "logs" / f"{peer}.log"
        return Place(peer, python, self._threads, log, {"BATON_PACKED_CACHE": packed_cache})

    def _add(self, peer: str, bits: int, way: str, target: Path, packed_cache: str = "none") -> None:
        model = {
            "checkpoint": str(self._folder / "plain"),
            "target": str(target),
            "bits": bits,
            "threads": self._threads,
        }
        phases = measure(self._place(peer, packed_cache), model, self._smoke)
        self.rows.append(
            {
                "peer": peer,
                "bits": bits,
                "way": way,
                "packed_mb": round(packed_mb(self._shape, bits), 1),
                "phases": phases,
            }
        )
        for name, held in phases.items():
            parts = "  ".join(f"{what.removesuffix('_mb')} {held[what]:7.1f}" for what in held)
            print(f"{bits:2} bits {peer:10} {way:6} {name:8} {parts}", flush=True)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--environments", type=Path, default=Path("build/cpu-peers"))
    made.add_argument("--checkpoints", type=Path, default=Path("build/cpu-checkpoints"))
    made.add_argument("--shape", default="0.5b")
    made.add_argument("--bits", default=",".join(map(str, FORMATS)))
    made.add_argument("--threads", type=int, default=2)
    args = made.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, shape = (Path(temporary), "tiny") if args.smoke else (args.checkpoints, args.shape)
        run = Run(args.environments, folder, shape, 1 if args.smoke else args.threads, args.smoke)
        for bits in [16] if args.smoke else map(int, args.bits.split(",")):
            run.measure(bits)
    write(
        args.json,
        "benchmarks.cpu.cpu_memory",
        {"prediction": PREDICTION, "unit": "MB", "shape": shape, "threads": args.threads, "rows": run.rows},
    )


if __name__ == "__main__":
    main()
