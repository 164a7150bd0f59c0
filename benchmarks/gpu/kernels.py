"""Every kernel's time beside its floor and beside other people's: `python -m benchmarks.gpu.kernels --json FILE` (one GPU, some
minutes). A floor is what must be moved over the *measured* copy bandwidth, or computed at the *measured* rate of a product.

Predicted, before anything was run on a GPU: elementwise kernels and decode attention from 1M tokens on reach 0.85 of the copy
bandwidth, and scattered pieces of KV, for which a launch takes few programs, 0.3, which is what NVLink moves; prefill attention
0.6 to 0.7 of SDPA's best backend on Hopper, whose kernels are warp-specialised as Triton's are not there, short of the target of
0.8; float8 products 0.85 of cuBLAS; 4-bit weights 0.6 of the bandwidth at 1 to 16 rows. Decode attention for CUDA graphs is
within 0.05 of the one planned on the host for equal contexts, and holds 0.8 where one of them is long; norms and
activations that round take 0.6 of the time of two steps.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.kernels --interpret-smoke` runs every case once, tiny, without a GPU: it shows that
the script works, and its times mean nothing."""

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.gpu.cases import REAL, SMOKE, Case, Cases, Sizes
from benchmarks.gpu.limits import Limits, measure, seconds
from benchmarks.gpu.session import Verdict, begin, parser, write
from benchmarks.gpu.step_cases import StepCases
from kernels.triton.platform import INTERPRETED


def every_case(sizes: Sizes, device: torch.device) -> Iterable[Case]:
    yield from Cases(sizes, device)
    yield from StepCases(sizes, device)


Row = dict[str, Any]


def run_case(case: Case, limits: Limits) -> Row:
    time_s, floor_s = seconds(case.run), limits.floor_s(case.num_bytes, case.num_flops, case.kind)
    peers = {name: seconds(run) for name, run in case.peers.items()}
    reached = min(peers.values(), default=0.0) / time_s if case.against else floor_s / time_s
    return {
        "name": case.name,
        "time_us": time_s * 1e6,
        "floor_us": floor_s * 1e6,
        "of_floor": floor_s / time_s,
        "peers_us": {name: peer_s * 1e6 for name, peer_s in peers.items()},
        "reached": reached,
        "target": case.target,
        "target_of": "fastest peer" if case.against else "floor",
        "met": reached >= case.target if case.target and not INTERPRETED else None,
    }


def run_all(
    cases: Iterable[Case],
    limits: Limits,
    budget_s: float,
    now: Callable[[], float] = time.monotonic,
    save: Callable[[list[Row]], None] = lambda _: None,
) -> tuple[list[Row], str]:
    """Rows of the cases that were begun in time, and the name of the first that was not. A case takes its compiling, then some
    120 ms for itself and for each peer. `save` is given all rows after each case."""
    until, rows = now() + budget_s, list[Row]()
    for case in cases:
        if now() >= until:
            return rows, case.name
        rows.append(run_case(case, limits))
        save(rows)
        print(show(rows[-1]), flush=True)
    return rows, ""


def verdicts(rows: Iterable[Row]) -> list[Verdict]:
    return [Verdict(row["name"], row["reached"], row["target"]) for row in rows if row["target"]]


def show(row: Row) -> str:
    peers = ", ".join(f"{name} {time:.1f}" for name, time in row["peers_us"].items())
    verdict = {None: "", True: "met", False: "missed"}[row["met"]]
    target = f"{row['target']} of {row['target_of']} {verdict}" if row["target"] else ""
    return f"{row['name']:48} {row['time_us']:10.1f} {row['floor_us']:10.1f} {row['of_floor']:6.2f}  {target:28} {peers}"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=7.5, help="No case is begun later.")
    args = options.parse_args()
    device = begin(args.interpret_smoke)
    limits = measure(device)
    print(f"copy {limits.copy_bytes_per_s / 1e9:.0f} GB/s; products, TFLOP/s: ", end="")
    print(", ".join(f"{kind} {rate / 1e12:.0f}" for kind, rate in limits.flops.items()))
    print(f"{'':48} {'µs':>10} {'floor µs':>10} {'ratio':>6}  {'target':28} peers, µs")
    found = {
        "copy_gb_per_s": limits.copy_bytes_per_s / 1e9,
        "tflops": {kind: rate / 1e12 for kind, rate in limits.flops.items()},
    }

    def save(rows: list[Row], **more: Any) -> None:
        content = {**found, "kernels": rows, **more}
        write(
            args.json,
            "benchmarks.gpu.kernels",
            device,
            content,
            verdicts(rows),
            complete=more.get("left_out_from") == "",
        )

    cases = every_case(SMOKE if INTERPRETED else REAL, device)
    rows, left_out = run_all(cases, limits, 60 * args.minutes, save=save)
    save(rows, left_out_from=left_out)
    if left_out:
        sys.exit(
            f"{args.minutes:g} minutes were over before {left_out!r}: run it again, compiled kernels are kept"
        )


if __name__ == "__main__":
    main()
