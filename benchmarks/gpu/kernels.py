"""Every kernel's time beside its floor and beside other people's: `python -m benchmarks.gpu.kernels --json FILE` (one GPU, two
minutes). A floor is what must be moved over the *measured* copy bandwidth, or computed at the *measured* rate of a product.

Predicted, before anything was run on a GPU: elementwise kernels and decode attention from 1M tokens on reach 0.85 of the copy
bandwidth, and scattered pieces of KV, for which a launch takes few programs, 0.3, which is what NVLink moves; prefill attention
0.6 to 0.7 of SDPA's best backend on Hopper, whose kernels are warp-specialised as Triton's are not there, short of the target of
0.8; float8 products 0.85 of cuBLAS; 4-bit weights 0.6 of the bandwidth at 1 to 16 rows. Decode attention for CUDA graphs is
within 0.05 of the one planned on the host for equal contexts, and holds 0.8 where one of them is long; norms and
activations that round take 0.6 of the time of two steps.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.kernels --interpret-smoke` runs every case once, tiny, without a GPU: it shows that
the script works, and its times mean nothing."""

import traceback
from collections.abc import Iterable
from functools import partial

import torch

from benchmarks.gpu.cases import REAL, SMOKE, Case, Cases, Make, Sizes
from benchmarks.gpu.limits import Limits, measure, replayed, seconds
from benchmarks.gpu.session import Results, Row, Verdict, begin, parser
from benchmarks.gpu.step_cases import StepCases
from kernels.triton.platform import INTERPRETED


def all_groups(sizes: Sizes, device: torch.device) -> dict[str, Make]:
    """Return what makes cases, by a name: those of attention and of large products first."""
    return Cases(sizes, device).groups() | StepCases(sizes, device).groups()


def every_case(sizes: Sizes, device: torch.device) -> Iterable[Case]:
    for make in all_groups(sizes, device).values():
        yield from make()


def run_case(case: Case, limits: Limits) -> Row:
    run = replayed(case.run) if case.replayed else case.run
    time_s, floor_s = seconds(run), limits.floor_s(case.num_bytes, case.num_flops, case.kind)
    peers = {name: seconds(run) for name, run in case.peers.items()}
    reached = min(peers.values(), default=0.0) / time_s if case.against else floor_s / time_s
    return {
        "time_us": time_s * 1e6,
        "floor_us": floor_s * 1e6,
        "of_floor": floor_s / time_s,
        "peers_us": {name: peer_s * 1e6 for name, peer_s in peers.items()},
        "reached": reached,
        "target": case.target,
        "target_of": "fastest peer" if case.against else "floor",
    }


def run_all(groups: dict[str, Make], limits: Limits, results: Results) -> None:
    """Make a row of each case: first of those that have not failed before. A case takes its compiling, then some 120 ms for
    itself and for each peer. What cannot be made is said, and the next group begun."""
    before = set(results.failed)
    for has_failed in (False, True) if before else (False,):
        for name, make in groups.items():
            try:
                for case in make():
                    if (case.name in before) == has_failed:
                        results.make(case.name, partial(run_case, case, limits))
            except Exception as error:
                traceback.print_exc()
                results.fail(f"making {name}", f"{type(error).__name__}: {error}")
            else:
                results.failed.pop(f"making {name}", None)


def verdicts(rows: dict[str, Row]) -> list[Verdict]:
    found = {name: row for name, row in rows.items() if row.get("target")}
    return [Verdict(name, row["reached"], row["target"]) for name, row in found.items()]


def main() -> None:
    args = parser(__doc__).parse_args()
    device = begin(args.interpret_smoke)
    results = Results(args.json, "benchmarks.gpu.kernels", device, verdicts)
    limits = measure(device)
    results.rows["limits"] = {
        "copy_gb_per_s": limits.copy_bytes_per_s / 1e9,
        **{f"{kind}_tflops": rate / 1e12 for kind, rate in limits.flops.items()},
    }
    run_all(all_groups(SMOKE if INTERPRETED else REAL, device), limits, results)
    results.end()


if __name__ == "__main__":
    main()
