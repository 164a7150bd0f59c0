"""What the GPU benchmarks' command lines have in common: where they run, or why they do not, and what a result says of it."""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.interpreter import replace_once
from kernels.triton.platform import INTERPRETED


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure and its target."""

    what: str
    measured: float
    target: float
    at_least: bool = True
    """Is the target the least that the figure should be, or the most?"""

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.at_least else self.measured <= self.target


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
    if INTERPRETED:
        replace_once()
    torch.manual_seed(0)
    return torch.device("cpu" if INTERPRETED else "cuda")


def write(
    path: Path | None,
    module: str,
    device: torch.device,
    content: dict[str, Any],
    verdicts: Sequence[Verdict] = (),
    *,
    complete: bool = True,
) -> None:
    """Write `content` so far, and `verdicts` on it, over what is there; nothing without a path. In the interpreter, whose times
    mean nothing, a verdict says neither that its target is met nor that it is missed."""
    if path is None:
        return
    about = {
        "device": "interpreter" if INTERPRETED else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": f"python -m {module}",
        "complete": complete,
        "verdicts": [asdict(one) | {"met": None if INTERPRETED else one.met} for one in verdicts],
    }
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps({**about, **content}, indent=1) + "\n")
    whole.replace(path)
