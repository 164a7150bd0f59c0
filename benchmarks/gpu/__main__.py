"""Everything that only a GPU can show, stage by stage: `make gpu`, or `python -m benchmarks.gpu --out FOLDER`.

Each stage writes FOLDER/STAGE.json while it runs, says its targets and verdicts, and redraws FOLDER/verdicts.png, so that a run
that is cut is still worth something. A stage that is complete there is not run again. `log.txt` has what stages print.

Without a network, on a machine that has PyTorch, Triton and little else, `make gpu-packages` beforehand brings the rest.

`--smoke` runs all stages, tiny, in Triton's interpreter, without a GPU: times mean nothing then."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Stage:
    module: str
    limit_s: float
    """It is ended then; what it has written by then stays."""
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]


STAGES = (
    Stage("benchmarks.gpu.decode_step", 120),
    Stage("benchmarks.gpu.prefill_step", 60),
    Stage("benchmarks.gpu.serving", 150),
    Stage("benchmarks.gpu.kernels", 150, ("--minutes", "2.2")),
    Stage("benchmarks.gpu.device_tests", 150),
)
"""What weighs most first; 9 minutes together where some need less than their limit."""


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
        draw(stages, folder)
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
    """Its output goes to the log, and its last lines here where it fails."""
    command = [sys.executable, "-m", stage.module, "--json", str(file), *stage.arguments]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    if smoke:
        command.append("--interpret-smoke")
        env |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = time.monotonic()
    with log.open("ab") as out:
        at = out.tell()
        out.write(f"==> {stage.name}\n".encode())
        out.flush()
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=env, stdout=out, stderr=out, timeout=limit_s, check=False
            ).returncode
            how = "" if code == 0 else f"it exited with {code}"
        except subprocess.TimeoutExpired:
            how = "its time was over"
    print(f"    {time.monotonic() - started:.0f} s{': ' if how else ''}{how}", flush=True)
    if how:
        print("\n".join(f"    | {line}" for line in log.read_text(errors="replace")[at:].splitlines()[-6:]))


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def draw(stages: Sequence[Stage], folder: Path) -> None:
    """Each figure as a share of its target. Nothing without matplotlib, or without a verdict."""
    verdicts = [one for stage in stages for one in _read(folder / f"{stage.name}.json").get("verdicts", [])]
    # Where the target is the most that may be, a figure is good below it; nothing can be drawn of a target of 0.
    shares = [(one["what"], one["measured"] / one["target"], one["met"]) for one in verdicts if one["target"]]
    if not shares:
        return
    try:
        import matplotlib as mpl  # noqa: PLC0415 (a bare machine may lack it)
    except ImportError:
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(10, 1 + 0.28 * len(shares)), layout="constrained")
    names, values, met = zip(*shares, strict=True)
    colours = [{None: "tab:grey", True: "tab:green", False: "tab:red"}[one] for one in met]
    axes.barh(range(len(names)), values, color=colours)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=1)
    num_met = sum(one is True for one in met)
    axes.set_title(f"{num_met} of {len(shares)} targets met")
    axes.set_xlabel("measured over its target")
    figure.savefig(folder / "verdicts.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
