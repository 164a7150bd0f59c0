"""Everything that only a GPU can show, stage by stage: `make gpu`, or `python -m benchmarks.gpu --out FOLDER`.

Each stage writes FOLDER/STAGE.json while it runs, and says its targets and verdicts, so that a run that is cut is still worth
something. Run again with the same FOLDER, it makes what is missing there. `log.txt` has what stages print. What fails is said and
hides nothing else: a row, a stage, or a process that an error has left without its device, which another one goes on for.

Without a network, on a machine that has PyTorch, Triton and little else, `make gpu-packages` beforehand brings the rest.

`--smoke` runs all stages, tiny, in Triton's interpreter, without a GPU: times mean nothing then."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Stage:
    module: str
    limit_s: float
    """It is ended then; what it has written by then stays."""

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]


STAGES = (
    Stage("benchmarks.gpu.on_ray", 150),
    Stage("benchmarks.gpu.decode_step", 80),
    Stage("benchmarks.gpu.prefill_step", 35),
    Stage("benchmarks.gpu.serving", 160),
    Stage("benchmarks.gpu.one_card", 90),
    Stage("benchmarks.gpu.kernels", 55),
    Stage("benchmarks.gpu.device_tests", 540),
)
"""What no card has shown comes first. The tests, which compile more than all others, get what is left; another run goes on. With
the log they make eight files, as many as may come back from some lent machines."""
AGAIN = 3
"""The least exit code of a stage for which another process shall go on. (`session` says why; it imports torch.)"""
_MOST_PROCESSES = 4
"""A stage gets no more of them."""


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    options.add_argument("--minutes", type=float, default=9.0, help="no stage runs longer than until then")
    options.add_argument("--only", default="", metavar="STAGES", help="names with commas between them")
    options.add_argument("--smoke", action="store_true", help="tiny, in the interpreter, without a GPU")
    args = options.parse_args()
    stages = chosen(args.only)
    args.out.mkdir(parents=True, exist_ok=True)
    sys.exit(run_stages(stages, args.out, 60 * args.minutes, smoke=args.smoke))


def chosen(names: str) -> Sequence[Stage]:
    """All of them for an empty text. Exits where one is unknown."""
    known = {stage.name: stage for stage in STAGES}
    wanted = [name for name in names.split(",") if name]
    if unknown := [name for name in wanted if name not in known]:
        sys.exit(f"there is no stage {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in wanted or known]


def run_stages(stages: Sequence[Stage], folder: Path, budget_s: float, *, smoke: bool) -> int:
    """0 where each stage is complete and no target is missed."""
    until = time.monotonic() + budget_s
    for number, stage in enumerate(stages, 1):
        left_s, file = until - time.monotonic(), folder / f"{stage.name}.json"
        head = f"[{number}/{len(stages)}] {stage.name}"
        if _read(file).get("complete"):
            print(f"{head}: complete already", flush=True)
        elif left_s <= 0:
            print(f"{head}: no time is left for it; run again with the same folder", flush=True)
        else:
            print(f"{head}: at most {min(stage.limit_s, left_s):.0f} s", flush=True)
            _run(stage, file, folder / "log.txt", min(stage.limit_s, left_s), smoke=smoke)
        for verdict in _read(file).get("verdicts", []):
            print(f"    {show(verdict)}", flush=True)
        for name, why in _read(file).get("failed", {}).items():
            print(f"    FAILED {name}: {why.splitlines()[0]}", flush=True)
    found = [_read(folder / f"{stage.name}.json") for stage in stages]
    missed = [one for content in found for one in content.get("verdicts", []) if one["met"] is False]
    incomplete = [
        stage.name for stage, content in zip(stages, found, strict=True) if not content.get("complete")
    ]
    print(f"{len(missed)} targets missed; not complete: {', '.join(incomplete) or 'none'}")
    return 1 if missed or incomplete else 0


def show(verdict: dict[str, Any]) -> str:
    word = {None: "-", True: "met", False: "MISSED"}[verdict["met"]]
    side = "at least" if verdict["at_least"] else "at most"
    return f"{word:6} {verdict['what']}: {verdict['measured']:.4g} ({side} {verdict['target']:.4g})"


def _run(stage: Stage, file: Path, log: Path, limit_s: float, *, smoke: bool) -> None:
    """Its output goes to the log, and its last lines here where it fails. Where an error has left its process without the device,
    or ended it, another process goes on."""
    command = [sys.executable, "-m", stage.module, "--json", str(file.resolve())]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    if smoke:
        command.append("--interpret-smoke")
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    for left in reversed(range(_MOST_PROCESSES)):
        started = time.monotonic()
        with log.open("ab") as out:
            at = out.tell()
            out.write(f"==> {stage.name}\n".encode())
            out.flush()
            code = _exit_code(command, env, out, limit_s)
        how = "" if code == 0 else "its time was over" if code is None else f"it exited with {code}"
        print(f"    {time.monotonic() - started:.0f} s{': ' if how else ''}{how}", flush=True)
        if how:
            said = log.read_bytes()[at:].decode(errors="replace").splitlines()
            print("\n".join(f"    | {line}" for line in said[-6:]), flush=True)
        limit_s -= time.monotonic() - started
        if code is None or 0 <= code < AGAIN or limit_s <= 0 or not left:
            return


def _exit_code(command: Sequence[str], env: dict[str, str], out: IO[bytes], limit_s: float) -> int | None:
    """None where it was ended, with all processes that it has started: they would compute beside the next stage."""
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, process_group=0) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


if __name__ == "__main__":
    main()
