"""The findings of checks, and the verdicts over measurements."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

SLOW_SHARE, WEAK_SHARE = 0.5, 0.8
"""A link below the first share of what is expected of it is not fit. Below the second it is worth a look."""
SLOW_SHARE_OF_MEDIAN, WEAK_SHARE_OF_MEDIAN = 0.2, 0.5
"""The same where the expectation is only the median of the other links."""


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding. `where` is a node, or `a -> b`. `fix` is what to do about it; empty where nothing is to be done."""

    where: str
    check: str
    verdict: Verdict
    measured: str
    expected: str = ""
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        return {key: str(value) for key, value in asdict(self).items()}


def judge_links(
    check: str, bytes_per_s: Mapping[str, float], expected_bytes_per_s: float, fix: str
) -> list[Finding]:
    """Return one finding for each link. Without an expectation (0) the median of all links is what is expected of each."""
    if not bytes_per_s:
        return []
    expected = expected_bytes_per_s or statistics.median(bytes_per_s.values())
    source = "expected" if expected_bytes_per_s else "median of all links"
    slow = SLOW_SHARE if expected_bytes_per_s else SLOW_SHARE_OF_MEDIAN
    weak = WEAK_SHARE if expected_bytes_per_s else WEAK_SHARE_OF_MEDIAN
    found: list[Finding] = []
    for link, measured in bytes_per_s.items():
        share = measured / expected if expected else 1.0
        verdict = Verdict.FAIL if share < slow else Verdict.WARN if share < weak else Verdict.OK
        found.append(
            Finding(
                where=link,
                check=check,
                verdict=verdict,
                measured=f"{measured / 1e9:.2f} GB/s",
                expected=f"{expected / 1e9:.2f} GB/s ({source})",
                fix="" if verdict is Verdict.OK else fix,
            )
        )
    return found


def judge_clock(where: str, skew_s: float, uncertainty_s: float, limit_s: float = 0.05) -> Finding:
    """Judge a clock. `skew_s` is that node's clock less this one's, known to within `uncertainty_s`."""
    bad = abs(skew_s) - uncertainty_s > limit_s
    return Finding(
        where=where,
        check="clock",
        verdict=Verdict.WARN if bad else Verdict.OK,
        measured=f"{skew_s * 1000:+.1f} ms (within {uncertainty_s * 1000:.1f} ms)",
        expected=f"within {limit_s * 1000:.0f} ms",
        fix="traces and logs will not line up: run chrony or ntpd on that node" if bad else "",
    )
