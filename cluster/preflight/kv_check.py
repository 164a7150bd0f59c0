"""How fast KV goes between two nodes by the transports that instances use, and which share that is of what the link can carry."""

from collections.abc import Sequence
from typing import Any

from cluster.preflight.findings import Finding, Verdict
from cluster.preflight.measured_links import Link, MeasuredLinks
from cluster.preflight.nodes import Ranks
from cluster.preflight.rank_job import RankJob

CHECK = "KV"
WEAK_KV_SHARE = 0.5
"""KV that is slower than this share of what the link has been seen to carry is worth a look. Mooncake's connector reaches 0.71 of
a NIC."""
_FIXES = {
    "tcp": "KV goes over TCP. Where there is RDMA: install NIXL, and give the pods their RDMA devices. Otherwise raise "
    "transfer.tcp_streams",
    "shm": "is other work filling the memory bus?",
    "nixl": "is it GPUDirect RDMA (nvidia-peermem or dma-buf), by the card next to the GPU? UCX_LOG_LEVEL=info says what UCX has "
    "chosen",
}
_OTHER_FIX = (
    "see which transports were measured, and set transfer.transport to a better one where there is one"
)
_NO_WAY_FIX = "instances of these nodes cannot hand KV over: set transfer.transport to one that both have (auto: all of them)"


async def measure_kv(ranks: Ranks, job: RankJob, measured: MeasuredLinks) -> list[Finding]:
    """Return one finding for each directed link. `measured` is what it was seen to carry."""
    results, failed = await ranks.run(job, CHECK)
    return failed or judge_kv(ranks.names, results, measured)


def judge_kv(
    names: Sequence[str], results: Sequence[dict[str, Any]], measured: MeasuredLinks
) -> list[Finding]:
    """Judge the results of `kv_rank.measure`."""
    found: list[Finding] = []
    for result in results:
        one = int(result["rank"])
        for other, ways in result["ways"].items():
            where = f"{names[one]} -> {names[int(other)]}"
            failures: dict[str, str] = result["failures"].get(other, {})
            found.append(_judge_link(where, ways, failures, measured, (one, int(other))))
    return found


def _judge_link(
    where: str, ways: dict[str, float], failures: dict[str, str], measured: MeasuredLinks, link: Link
) -> Finding:
    broken = "".join(f"; {name} failed: {why}" for name, why in failures.items())
    if not ways:
        return Finding(
            where=where,
            check=CHECK,
            verdict=Verdict.FAIL,
            measured=f"no transport reaches it{broken}",
            expected="one that does",
            fix=_NO_WAY_FIX,
        )
    best = max(ways, key=ways.__getitem__)
    said = f"{ways[best] / 1e9:.2f} GB/s by {best}"
    limit = measured.bytes_per_s.get(link, 0.0)
    share = ways[best] / limit if limit else 1.0
    weak = share < WEAK_KV_SHARE
    if limit:
        said += f", {share:.0%} of the {limit / 1e9:.2f} GB/s of {measured.by}"
    return Finding(
        where=where,
        check=CHECK,
        verdict=Verdict.WARN if weak or failures else Verdict.OK,
        measured=said + broken,
        expected=f"at least {WEAK_KV_SHARE:.0%} of {measured.by}" if limit else "",
        fix=_FIXES.get(best, _OTHER_FIX) if weak else _OTHER_FIX if failures else "",
    )
