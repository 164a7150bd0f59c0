"""Runs NVIDIA's nccl-tests over the GPUs of one node, where they are installed: numbers checked, bus bandwidth measured."""

import re
import shutil
import subprocess

from cluster.preflight.findings import Finding, Verdict

_PROGRAMS = {
    "all_reduce_perf": "tensor parallelism",
    "sendrecv_perf": "KV from prefill to decode, and pipeline stages",
    "alltoall_perf": "experts",
}
"""What of Baton does such work."""
_TIMEOUT_S = 120.0
_WRONG = re.compile(r"# Out of bounds values : (\d+)")
_BANDWIDTH = re.compile(r"# Avg bus bandwidth\s*: ([0-9.]+)")


def check_nccl_tests(where: str, num_gpus: int) -> list[Finding]:
    """Run them. Skipped with fewer than two GPUs: there is nothing between them to measure."""
    installed = {program: path for program in _PROGRAMS if (path := shutil.which(program))}
    if not installed:
        return [_skipped(where, "not installed: torch.distributed measures between nodes only")]
    if num_gpus < 2:
        return [_skipped(where, f"{num_gpus} GPUs")]
    return [_run(where, program, path, num_gpus) for program, path in installed.items()]


def _run(where: str, program: str, path: str, num_gpus: int) -> Finding:
    command = [path, "-b", "64M", "-e", "256M", "-f", "2", "-c", "1", "-g", str(num_gpus)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return _unfit(where, program, f"not done after {_TIMEOUT_S:g} s")
    wrong, bandwidth = _WRONG.search(done.stdout), _BANDWIDTH.search(done.stdout)
    if done.returncode or wrong is None or bandwidth is None:
        said = (done.stderr or done.stdout).strip().splitlines()
        return _unfit(where, program, f"exit {done.returncode}: {said[-1] if said else 'it said nothing'}")
    if int(wrong[1]):
        return _unfit(where, program, f"{wrong[1]} wrong values")
    return Finding(
        where=where,
        check=program,
        verdict=Verdict.OK,
        measured=f"{float(bandwidth[1]):.1f} GB/s bus bandwidth over {num_gpus} GPUs ({_PROGRAMS[program]})",
        expected="right numbers",
    )


def _skipped(where: str, why: str) -> Finding:
    return Finding(where=where, check="nccl-tests", verdict=Verdict.SKIP, measured=why)


def _unfit(where: str, program: str, measured: str) -> Finding:
    fix = "take this node out, and look at its GPUs and NVLinks (nvidia-smi topo -m, nvidia-smi nvlink -s, dmesg for Xid)"
    return Finding(
        where=where,
        check=program,
        verdict=Verdict.FAIL,
        measured=measured,
        expected="right numbers",
        fix=fix,
    )
