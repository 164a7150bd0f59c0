"""Every metric's name, in one file. Served by /metrics of each ingress."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cluster.timeline import Timeline

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.45, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)


class IngressMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "baton_http_requests", "HTTP requests by route and status", ["route", "status"], registry=registry
        )
        self.running = Gauge(
            "baton_requests_running", "Sequences that clients are waiting for", registry=registry
        )
        self.cancelled = Counter(
            "baton_requests_cancelled", "Sequences whose client went away", registry=registry
        )
        self.rejected = Counter("baton_requests_rejected", "Sequences refused for load", registry=registry)
        self.refused = Counter(
            "baton_requests_refused",
            "HTTP requests that were refused or failed, by tenant and reason",
            ["tenant", "reason"],
            registry=registry,
        )
        self.tenant_tokens = Counter(
            "baton_tenant_tokens", "Tokens by tenant and kind", ["tenant", "kind"], registry=registry
        )
        self.failed = Counter(
            "baton_requests_failed", "Sequences that ended in another error", registry=registry
        )
        self.prompt_tokens = Counter("baton_prompt_tokens", "Prompt tokens accepted", registry=registry)
        self.output_tokens = Counter("baton_output_tokens", "Tokens delivered to clients", registry=registry)
        self.ttft_s = Histogram(
            "baton_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self.itl_s = Histogram(
            "baton_inter_token_latency_seconds",
            "Gap between two tokens of a sequence",
            buckets=_GAP_S,
            registry=registry,
        )
        self.e2e_s = Histogram(
            "baton_request_duration_seconds",
            "From the request's arrival to its last token",
            buckets=_LATENCY_S,
            registry=registry,
        )


class RequestMetrics:
    """From the timelines of requests: placing, hand-over, SLO attainment, failures survived."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue_s = Histogram(
            "baton_placement_wait_seconds",
            "From the request for a place to the place",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self._lost = Counter(
            "baton_attempts_lost",
            "Attempts that went on elsewhere: an instance died or drained",
            registry=registry,
        )
        self._transfers = Counter(
            "baton_kv_transfers", "Hand-overs from prefill to decode", ["transport"], registry=registry
        )
        self._bytes = Counter("baton_kv_transfer_bytes", "KV handed over", ["transport"], registry=registry)
        self._first_byte_s = Histogram(
            "baton_kv_first_byte_seconds",
            "From the grant to the end of the first write",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self._exposed_s = Histogram(
            "baton_kv_transfer_exposed_seconds",
            "From the first token to the end of the KV transfer",
            buckets=(0.0001, 0.00025, 0.0005, *_GAP_S),
            registry=registry,
        )
        self._prefill_queue_s = Histogram(
            "baton_prefill_queue_seconds",
            "From the grant to the first step with the prompt",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self._slo = Counter(
            "baton_slo_requests",
            "Requests by service class, and whether both of its targets were met",
            ["slo_class", "attained"],
            registry=registry,
        )

    def observe(self, timeline: Timeline) -> None:
        """A cluster.timeline.Observe."""
        for attempt in timeline.attempts:
            if attempt.placed_s is not None:
                self._queue_s.observe(attempt.placed_s - attempt.started_s)
            if attempt.lost:
                self._lost.inc()
            if (handed := attempt.handed_over) is not None:
                times = handed.times
                self._transfers.labels(times.transport).inc()
                self._bytes.labels(times.transport).inc(handed.num_bytes)
                self._first_byte_s.observe(times.first_byte_s)
                self._exposed_s.observe(times.exposed_s)
                self._prefill_queue_s.observe(times.queue_s)
        self._slo.labels(timeline.request.slo.name, str(attained(timeline)).lower()).inc()


def attained(timeline: Timeline) -> bool:
    """Were the class's targets met? TPOT is the mean gap after the first token, as MLPerf has it. A failed request misses."""
    slo = timeline.request.slo
    first_s = next((a.first_token_s for a in timeline.attempts if a.first_token_s is not None), None)
    if timeline.error or first_s is None or first_s - timeline.started_s > slo.ttft_s:
        return False
    num_gaps = timeline.num_output - 1
    return num_gaps < 1 or (timeline.ended_s - first_s) / num_gaps <= slo.tpot_s
