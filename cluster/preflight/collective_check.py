"""The collectives and links of nodes as torch.distributed measures them, where nccl-tests cannot: on CPUs, and where they are not
installed."""

from collections.abc import Sequence
from typing import Any

from cluster.preflight.findings import Finding, Verdict, judge_links
from cluster.preflight.measured_links import MeasuredLinks
from cluster.preflight.nodes import Ranks
from cluster.preflight.rank_job import RankJob

_SLOW_LINK = "find what shares or limits this link: cable, switch port, NIC rate, MTU, container network (ethtool, iperf3)"


async def measure_by_torch(ranks: Ranks, job: RankJob, expected_bytes_per_s: float) -> MeasuredLinks:
    """Measure an all-reduce and an all-to-all over all ranks, and every directed pair."""
    backend = job.backend
    results, failed = await ranks.run(job, f"{backend} all-reduce")
    if failed:
        return MeasuredLinks(failed)
    links = {(result["rank"], int(to)): speed for result in results for to, speed in result["links"].items()}
    by = f"{backend} send/recv"
    named = {f"{ranks.names[one]} -> {ranks.names[to]}": speed for (one, to), speed in links.items()}
    findings = [_judge_all(ranks.names, results, backend, name) for name in ("all-reduce", "all-to-all")]
    return MeasuredLinks([*findings, *judge_links(by, named, expected_bytes_per_s, _SLOW_LINK)], links, by)


def _judge_all(
    names: Sequence[str], results: Sequence[dict[str, Any]], backend: str, operation: str
) -> Finding:
    wrong = [names[int(result["rank"])] for result in results if not result[operation]["correct"]]
    slowest = min(result[operation]["bus_bytes_per_s"] for result in results)
    return Finding(
        where="all nodes",
        check=f"{backend} {operation}",
        verdict=Verdict.FAIL if wrong else Verdict.OK,
        measured=f"wrong numbers on {', '.join(wrong)}"
        if wrong
        else f"{slowest / 1e9:.2f} GB/s bus bandwidth",
        expected="right numbers",
        fix="numbers change on the way: take these nodes out and test their memory, GPU and NIC"
        if wrong
        else "",
    )
