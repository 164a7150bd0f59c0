"""Computes figures from records.

TTFT: request sent to first token. ITL: each gap between tokens. TPOT: mean gap after the first token. E2E: sent to last token.
SLO attainment counts every offered request; one that failed or was refused is a miss. Goodput is the highest offered rate with
enough attainment. Requests within both targets per second are `slo_requests_per_s`."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from baton.bench.client import Record

Percentiles = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    num_offered: int
    num_ok: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    tpot_ms: Percentiles
    e2e_ms: Percentiles
    attainment: float
    slo_ttft_ms: float
    slo_tpot_ms: float
    slo_requests_per_s: float
    late_p99_ms: float
    """How late an open loop sent its requests. The client itself causes that."""
    offered_rate: float = 0.0

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def ttft_s(record: Record) -> float:
    return record.tokens_at[0] - record.sent_at


def gaps_s(record: Record) -> list[float]:
    return [later - earlier for earlier, later in zip(record.tokens_at, record.tokens_at[1:], strict=False)]


def tpot_s(record: Record) -> float | None:
    """None for a single token. The server's token count is used where it gave one: a chunk may carry several."""
    count = max(record.output_tokens, len(record.tokens_at))
    return (record.tokens_at[-1] - record.tokens_at[0]) / (count - 1) if count > 1 else None


def meets(record: Record, slo_ttft_ms: float, slo_tpot_ms: float) -> bool:
    if record.error:
        return False
    tpot = tpot_s(record)
    return ttft_s(record) * 1e3 <= slo_ttft_ms and (tpot is None or tpot * 1e3 <= slo_tpot_ms)


def summarise(
    records: Sequence[Record], slo_ttft_ms: float, slo_tpot_ms: float, offered_rate: float = 0.0
) -> Summary:
    good = [record for record in records if not record.error]
    start = min((record.sent_at for record in records), default=0.0)
    duration_s = max((record.done_at for record in records), default=0.0) - start
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    output = sum(max(record.output_tokens, len(record.tokens_at)) for record in good)
    prompt = sum(record.prompt_tokens for record in good)
    met = sum(meets(record, slo_ttft_ms, slo_tpot_ms) for record in records)
    return Summary(
        num_offered=len(records),
        num_ok=len(good),
        errors=dict(Counter(record.error for record in records if record.error)),
        duration_s=duration_s,
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=output * per_s,
        total_tokens_per_s=(output + prompt) * per_s,
        ttft_ms=percentiles([ttft_s(r) * 1e3 for r in good]),
        itl_ms=percentiles([gap * 1e3 for r in good for gap in gaps_s(r)]),
        tpot_ms=percentiles([t * 1e3 for r in good if (t := tpot_s(r)) is not None]),
        e2e_ms=percentiles([(r.tokens_at[-1] - r.sent_at) * 1e3 for r in good]),
        attainment=met / len(records) if records else 0.0,
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
        slo_requests_per_s=met * per_s,
        late_p99_ms=percentiles([record.late_s * 1e3 for record in records]).get("p99", 0.0),
        offered_rate=offered_rate,
    )


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return nearest-rank p50, p90, p99, and the mean; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in (50, 90, 99)}
    return {"mean": sum(ordered) / len(ordered), **ranks}


def goodput(sweep: Sequence[Summary], wanted: float) -> float:
    """Return the highest offered rate whose attainment is at least `wanted`, and that of every lower rate too; 0 if there is
    none."""
    best = 0.0
    for summary in sorted(sweep, key=lambda s: s.offered_rate):
        if summary.attainment < wanted:
            break
        best = summary.offered_rate
    return best
