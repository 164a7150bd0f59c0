"""Whether llama.cpp, Baton and transformers compute the same of a GGUF file of each architecture.

    python -m benchmarks.engine.gguf_parity [--environments build/cpu-peers] [--json FILE] [--only NAME ...]

Each architecture gets a tiny random checkpoint, of which a file is made as llama.cpp's converter makes it
(`tests.models.gguf_converter`). transformers computes the checkpoint, and the two others the file, all in float32, but for
llama.cpp's KV cache, which has 16 bits. The differences are the largest of 28 x 320 logits, as shares of their standard
deviation.
`python -m benchmarks.cpu.install --peers llama_cpp` installs the library.

Prediction: Baton below 0.0001 and llama.cpp below 0.05 for each."""

import os
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cpu.install import python_of
from benchmarks.report import parser, write
from kernels.cpu.library import native
from models.files.hub import resolve
from models.registry import load_model
from tests.models.checkpoints import CPU, Paged, make
from tests.models.gguf_cases import CASES, Case
from tests.models.gguf_files import write_checkpoint

_PROMPT = list(range(2, 30))
_SAME = 0.05
"""What 16 bits of KV change at most, by far."""


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--environments", type=Path, default=Path("build/cpu-peers"))
    asked.add_argument("--only", nargs="+", default=[], metavar="NAME", help="architectures to try")
    args = asked.parse_args()
    rows = list[dict[str, Any]]()
    native()  # The library stays where it is.
    for name in args.only or ([*CASES][:1] if args.smoke else CASES):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            row = {"architecture": CASES[name].architecture, "family": CASES[name].family}
            rows.append(row | _compared(CASES[name], Path(folder), python_of(args.environments, "llama_cpp")))
        print(rows[-1], flush=True)
        write(args.json, "benchmarks.engine.gguf_parity", {"rows": rows})


def _compared(case: Case, folder: Path, python: Path | None) -> dict[str, Any]:
    reference, path = make(folder / "plain", case.config(), 0), folder / "model.gguf"
    write_checkpoint(path, folder / "plain", "F32", case.architecture)
    with torch.inference_mode():
        want = reference(torch.tensor([_PROMPT])).logits[0].numpy()
    model = load_model(resolve(str(path)), "float32", CPU)
    own = Paged(model, 1, random.Random(0)).step([(0, 0, _PROMPT)])[0].numpy()
    said: dict[str, Any] = {"baton": _share(own, want)}
    if python is None:
        return said | {"llama_cpp": None, "why": "llama.cpp's library is not installed"}
    done = subprocess.run(
        [python, "-m", "benchmarks.engine.gguf_logits_peer", path, folder / "logits.npy", *map(str, _PROMPT)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return said | {"llama_cpp": None, "why": _reason(done.stderr)}
    share = _share(np.load(folder / "logits.npy"), want)
    return said | {"llama_cpp": share, "same": share < _SAME, "version": done.stdout.strip()}


def _share(got: np.ndarray, want: np.ndarray) -> float:
    return round(float(np.abs(got - want).max() / want.std()), 6)


def _reason(said: str) -> str:
    lines = [line.strip() for line in said.splitlines()] or ["it crashed"]
    found = (line.rpartition("/")[2] for line in lines if "GGML_ASSERT" in line or "error" in line)
    return next(found, lines[-1])


if __name__ == "__main__":
    main()
