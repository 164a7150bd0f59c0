"""What the GPU benchmarks' command lines have in common: where they run, or why they do not, and what a result says of it.

A stage is made of rows. Each is written to the stage's file when it is there, what fails is said in its place, and the others are
made all the same. A run that goes on with the file makes what is missing, first what no run has begun."""

import argparse
import gc
import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.interpreter import replace_once
from kernels.triton.platform import INTERPRETED

Row = dict[str, Any]
AGAIN = 3
"""The exit code of a stage that wants another process, since an error has left this one without its device."""
CUT = "the process has ended in it"


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
    """With `--json FILE`, which `Results` takes, and `--interpret-smoke`, which `begin` asks for."""
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


class Results:
    """A stage's rows by name, in its file."""

    def __init__(
        self,
        path: Path | None,
        module: str,
        device: torch.device,
        verdicts: Callable[[dict[str, Row]], Sequence[Verdict]],
    ) -> None:
        """Go on with what the file has of this card; nothing is written without a path. In the interpreter, whose times mean
        nothing, a verdict says neither that its target is met nor that it is missed."""
        self._path, self._verdicts = path, verdicts
        self._about: Row = {
            "device": "interpreter" if INTERPRETED else torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "command": f"python -m {module}",
        }
        known: Row = json.loads(path.read_text()) if path is not None and path.exists() else {}
        goes_on = known.get("device") == self._about["device"]
        self.rows: dict[str, Row] = known["rows"] if goes_on else {}
        self.failed: dict[str, str] = known["failed"] if goes_on else {}

    def failed_by_itself(self, name: str) -> bool:
        """Return whether the row has failed, and not because its process was ended."""
        return self.failed.get(name, CUT) != CUT

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those without a row, first those that no run has begun."""
        return sorted((name for name in names if name not in self.rows), key=lambda name: name in self.failed)

    def make(self, name: str, run: Callable[[], Row]) -> bool:
        """Make a row that is missing, or say why there is none. Exits with AGAIN where the device is of no use any more."""
        if name in self.rows:
            return True
        self.fail(name, CUT)
        try:
            row = run()
        except Exception as error:
            traceback.print_exc()
            self.fail(name, f"{type(error).__name__}: {error}"[:500])
        else:
            del self.failed[name]
            self.rows[name] = row
            self.save(complete=False)
            print(f"{name}: {shown(row)}", flush=True)
        gc.collect()
        if not INTERPRETED:
            self._give_back()
        return name in self.rows

    def fail(self, name: str, why: str) -> None:
        self.failed[name] = why
        self.save(complete=False)

    def end(self) -> None:
        """Exit with 1 where a row is missing."""
        self.save(complete=not self.failed)
        if self.failed:
            sys.exit(f"failed: {', '.join(self.failed)}")

    def save(self, *, complete: bool) -> None:
        if self._path is None:
            return
        verdicts = [
            asdict(one) | {"met": None if INTERPRETED else one.met} for one in self._verdicts(self.rows)
        ]
        content = self._about | {
            "complete": complete,
            "verdicts": verdicts,
            "failed": self.failed,
            "rows": self.rows,
        }
        whole = self._path.with_suffix(".part")
        whole.write_text(json.dumps(content, indent=1) + "\n")
        whole.replace(self._path)

    @staticmethod
    def _give_back() -> None:
        try:
            torch.cuda.synchronize()  # an error of a kernel is told by the next call, and would be another row's
            torch.cuda.empty_cache()
        except Exception as error:
            print(f"the device is of no use any more: {error}", flush=True)
            sys.exit(AGAIN)


def shown(row: Row) -> str:
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if not isinstance(value, list)
    )
