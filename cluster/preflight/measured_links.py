"""What a measurement of the links between nodes has found."""

from dataclasses import dataclass, field

from cluster.preflight.findings import Finding

Link = tuple[int, int]
"""The numbers of the node that sends and of the one that receives."""


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    findings: list[Finding]
    bytes_per_s: dict[Link, float] = field(default_factory=dict[Link, float])
    """The bandwidth of each link that could be measured."""
    by: str = ""
    """What has measured them."""
