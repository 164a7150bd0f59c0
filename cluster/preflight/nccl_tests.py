"""Runs NVIDIA's nccl-tests, where they are installed, over the GPUs of a node and over nodes: numbers checked, bus bandwidth
measured."""

import asyncio
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.preflight.child_processes import ProcessEnd, run_here
from cluster.preflight.findings import Finding, Verdict, judge_links
from cluster.preflight.hydra import NEEDED, run_over
from cluster.preflight.measured_links import Link, MeasuredLinks
from cluster.preflight.nodes import Node
from core.errors import ConfigError

SENDRECV = "sendrecv_perf"
_PROGRAMS = {
    "all_reduce_perf": "tensor parallelism",
    SENDRECV: "KV from prefill to decode, and pipeline stages",
    "alltoall_perf": "experts",
}
"""What of Baton does such work."""
_SIZES = ("-b", "64M", "-e", "256M", "-f", "2", "-c", "1")
_TIMEOUT_S = 120.0
_WRONG = re.compile(r"# Out of bounds values : (\d+)")
_BANDWIDTH = re.compile(r"# Avg bus bandwidth\s*: ([0-9.]+)")
_NODE_FIX = "take this node out, and look at its GPUs and NVLinks (nvidia-smi topo -m, nvidia-smi nvlink -s, dmesg for Xid)"
_FABRIC_FIX = (
    "do the nodes reach each other on every port, and does NCCL use the right cards (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, "
    "NCCL_IB_HCA)?"
)
_LINK_FIX = "find what limits this link: NCCL_DEBUG=INFO says whether it uses RDMA (NET/IB, GDRDMA); or cable, switch port, PCIe"


@dataclass(frozen=True, slots=True)
class NodeTests:
    """What was measured between the GPUs of one node."""

    findings: list[Finding]
    sendrecv_bytes_per_s: float = 0.0
    """0 where it was not measured."""


def why_not_over_nodes() -> str:
    """Return what this node lacks to take part in tests over nodes; empty where it lacks nothing."""
    lacking = [program for program in (*_PROGRAMS, *NEEDED) if shutil.which(program) is None]
    return f"no {', '.join(lacking)}" if lacking else ""


async def measure_node(where: str, num_gpus: int) -> NodeTests:
    """Run them over a node's GPUs. Skipped with fewer than two: there is nothing between them to measure."""
    installed = [program for program in _PROGRAMS if shutil.which(program)]
    if not installed:
        return NodeTests([_skipped(where, "not installed")])
    if num_gpus < 2:
        return NodeTests([_skipped(where, f"{num_gpus} GPUs")])
    findings: list[Finding] = []
    sendrecv = 0.0
    for program in installed:
        try:
            reached = _read(await run_here([program, *_SIZES, "-g", str(num_gpus)], _TIMEOUT_S))
        except ConfigError as error:
            findings.append(_unfit(where, program, str(error), _NODE_FIX))
            continue
        findings.append(_fit(where, program, reached, f"{num_gpus} GPUs"))
        sendrecv = reached if program == SENDRECV else sendrecv
    return NodeTests(findings, sendrecv)


async def measure_over_nodes(
    nodes: Sequence[Node], num_gpus: int, here: str, expected_bytes_per_s: float
) -> MeasuredLinks:
    """Run them over nodes, of which each has at least `num_gpus`: collectives over all GPUs of all nodes, messages between each
    two nodes, one GPU each. `here` is where the nodes reach this machine."""
    findings: list[Finding] = []
    for program in [program for program in _PROGRAMS if program != SENDRECV]:
        try:
            reached = await _over(nodes, program, num_gpus, here)
        except ConfigError as error:
            findings.append(_unfit("all nodes", program, str(error), _FABRIC_FIX))
        else:
            findings.append(_fit("all nodes", program, reached, f"{len(nodes)} nodes of {num_gpus} GPUs"))
    links: dict[Link, float] = {}
    for pairs in rounds(len(nodes)):
        tests = [_over([nodes[one], nodes[other]], SENDRECV, 1, here) for one, other in pairs]
        for (one, other), result in zip(
            pairs, await asyncio.gather(*tests, return_exceptions=True), strict=True
        ):
            if isinstance(result, ConfigError):
                where = f"{nodes[one].name} - {nodes[other].name}"
                findings.append(_unfit(where, SENDRECV, str(result), _FABRIC_FIX))
            elif isinstance(result, BaseException):
                raise result
            else:
                links[one, other] = links[other, one] = result
    named = {
        f"{nodes[one].name} - {nodes[other].name}": links[one, other] for one, other in links if one < other
    }
    findings += judge_links(SENDRECV, named, expected_bytes_per_s, _LINK_FIX)
    return MeasuredLinks(findings, links, SENDRECV)


def rounds(num_nodes: int) -> list[list[Link]]:
    """Return all pairs of nodes, in rounds in which each node is in one pair at most (the circle method)."""
    seats = list(range(num_nodes + num_nodes % 2))
    found: list[list[Link]] = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < num_nodes])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


async def _over(nodes: Sequence[Node], program: str, num_gpus: int, here: str) -> float:
    return _read(await run_over(nodes, [program, *_SIZES, "-g", str(num_gpus)], here, _TIMEOUT_S))


def _read(ended: ProcessEnd) -> float:
    """Return the bus bandwidth in bytes per second. Raises ConfigError with what is wrong."""
    wrong, bandwidths = _WRONG.search(ended.out), _BANDWIDTH.findall(ended.out)
    if ended.status or wrong is None or not bandwidths:
        raise ConfigError(f"exit {ended.status}: {ended.last_words}")
    if int(wrong[1]):
        raise ConfigError(f"{wrong[1]} wrong values")
    if len(bandwidths) > 1:
        raise ConfigError("each process has measured by itself: nccl-tests were built without MPI=1")
    return float(bandwidths[0]) * 1e9


def _fit(where: str, program: str, bytes_per_s: float, over: str) -> Finding:
    return Finding(
        where=where,
        check=program,
        verdict=Verdict.OK,
        measured=f"{bytes_per_s / 1e9:.1f} GB/s bus bandwidth over {over} ({_PROGRAMS[program]})",
        expected="right numbers",
    )


def _skipped(where: str, why: str) -> Finding:
    return Finding(where=where, check="nccl-tests", verdict=Verdict.SKIP, measured=why)


def _unfit(where: str, program: str, measured: str, fix: str) -> Finding:
    return Finding(
        where=where, check=program, verdict=Verdict.FAIL, measured=measured, expected="right numbers", fix=fix
    )
