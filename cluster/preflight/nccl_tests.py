"""Runs NVIDIA's nccl-tests over the GPUs of one node, where they are installed: sums checked, bus bandwidth measured."""

import re
import shutil
import subprocess

from cluster.preflight.findings import Finding, Verdict

_BINARY = "all_reduce_perf"
_TIMEOUT_S = 300.0
_WRONG = re.compile(r"# Out of bounds values : (\d+)")
_BANDWIDTH = re.compile(r"# Avg bus bandwidth\s*: ([0-9.]+)")


def check_nccl_tests(where: str, num_gpus: int) -> Finding:
    """Run them. Skipped with fewer than two GPUs: there is nothing between them to measure."""
    binary = shutil.which(_BINARY)
    if binary is None:
        return Finding(
            where=where,
            check="nccl-tests",
            verdict=Verdict.SKIP,
            measured="not installed: torch.distributed measures between nodes only",
        )
    if num_gpus < 2:
        return Finding(where=where, check="nccl-tests", verdict=Verdict.SKIP, measured=f"{num_gpus} GPUs")
    command = [binary, "-b", "64M", "-e", "256M", "-f", "2", "-c", "1", "-g", str(num_gpus)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return _unfit(where, f"not done after {_TIMEOUT_S:g} s")
    wrong, bandwidth = _WRONG.search(done.stdout), _BANDWIDTH.search(done.stdout)
    if done.returncode or wrong is None or bandwidth is None:
        said = (done.stderr or done.stdout).strip().splitlines()
        return _unfit(where, f"exit {done.returncode}: {said[-1] if said else 'it said nothing'}")
    if int(wrong[1]):
        return _unfit(where, f"{wrong[1]} wrong values")
    measured = f"{float(bandwidth[1]):.1f} GB/s bus bandwidth over {num_gpus} GPUs"
    return Finding(
        where=where, check="nccl-tests", verdict=Verdict.OK, measured=measured, expected="right sums"
    )


def _unfit(where: str, measured: str) -> Finding:
    fix = "take this node out, and look at its GPUs and NVLinks (nvidia-smi topo -m, nvidia-smi nvlink -s, dmesg for Xid)"
    return Finding(
        where=where,
        check="nccl-tests",
        verdict=Verdict.FAIL,
        measured=measured,
        expected="right sums",
        fix=fix,
    )
