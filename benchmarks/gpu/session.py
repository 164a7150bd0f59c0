"""What the GPU benchmarks' command lines have in common: where they run, or why they do not, and what a result says of it."""

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.triton.platform import INTERPRETED


def parser(text: str | None) -> argparse.ArgumentParser:
    """With `--json FILE`, which `write` takes, and `--interpret-smoke`, which `begin` asks for."""
    made = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    made.add_argument("--json", type=Path)
    made.add_argument("--interpret-smoke", action="store_true")
    return made


def begin(interpret_smoke: bool) -> torch.device:
    """The device to measure, with a seed of its own. Exits where there is none, or where the interpreter was not asked for."""
    if interpret_smoke != INTERPRETED:
        sys.exit(
            "--interpret-smoke needs TRITON_INTERPRET=1 in the environment, and nothing else may have it"
        )
    if not INTERPRETED and not torch.cuda.is_available():
        sys.exit(
            "no CUDA device: there is nothing to measure (--interpret-smoke shows that the script works)"
        )
    torch.manual_seed(0)
    return torch.device("cpu" if INTERPRETED else "cuda")


def write(path: Path | None, module: str, device: torch.device, content: dict[str, Any]) -> None:
    """Nothing without a path."""
    if path:
        about = {
            "device": "interpreter" if INTERPRETED else torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "command": f"python -m {module}",
        }
        path.write_text(json.dumps({**about, **content}, indent=1) + "\n")
