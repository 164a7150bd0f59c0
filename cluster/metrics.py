"""Every metric's name, in one file. Served by /metrics of each ingress."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
