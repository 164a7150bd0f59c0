"""Checks what instances that share a card need of this node: the MPS daemon that holds each to its share of the processors."""

from collections.abc import Iterator, Mapping

from cluster.preflight.findings import Finding, Verdict
from core.config.cluster_config import ClusterConfig
from device.mps import why_no_daemon


def check_card(where: str, config: ClusterConfig, env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield one finding where the configuration has instances share cards. `env` is that in which instances start."""
    if not config.decode.shares_card:
        return
    bounds = {"prefill": config.prefill.most_sms, "decode": config.decode.most_sms}
    bounded = [f"{name} to {share:.0%}" for name, share in bounds.items() if share < 1]
    why = why_no_daemon(env)
    verdict = (Verdict.FAIL if bounded else Verdict.WARN) if why else Verdict.OK
    yield Finding(
        where=where,
        check="MPS",
        verdict=verdict,
        measured=why or "its daemon listens",
        expected=f"a daemon that bounds {' and '.join(bounded)} of a card's processors"
        if bounded
        else "a daemon, so that kernels of both instances run beside each other and not in turns",
        fix="nvidia-cuda-mps-control -d, as the user of the instances, before they start" if why else "",
    )
