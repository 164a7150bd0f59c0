"""Every metric's name, but for those of pools (`pool_metrics`). Each ingress serves them at /metrics.

An ingress knows its own requests. Of the instances it knows what the scheduler has been told (`core.messages.Status`), and has no
other source of figures. Under vLLM's names the same figures appear once more, so that dashboards made for it work."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.ingress.telemetry import request_context
from cluster.ingress.telemetry.pool_metrics import pool_metrics
from cluster.ingress.telemetry.timeline import Timeline, attained, first_token_at
from cluster.ingress.telemetry.token_metrics import TokenCounter, TokenHistogram
from cluster.ingress.telemetry.vllm_names import Alias, VllmNames
from core.config.adapter_config import adapter_name
from core.reports import InstanceStatus, Status

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.45, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_EXPOSED_S = (0.0001, 0.00025, 0.0005, *_GAP_S)
_TOKENS = tuple(float(k * 10**e) for e in range(6) for k in (1, 2, 5))


class IngressMetrics:
    """What the API sees of its requests while they run."""

    def __init__(self, registry: CollectorRegistry, model: str = "") -> None:
        """`model` is for the label of vLLM's names."""

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"baton_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"baton_{name}", text, buckets=buckets, registry=registry)

        self.registry = registry
        self.requests = counter("http_requests", "HTTP requests by route and status", "route", "status")
        self.refused = counter(
            "requests_refused", "HTTP requests refused or failed, by tenant and reason", "tenant", "reason"
        )
        self.tenant_tokens = TokenCounter(
            registry, "tenant_tokens", "Tokens by tenant and kind", "tenant", "kind"
        )
        self.running = Gauge(
            "baton_requests_running", "Sequences that clients are waiting for", registry=registry
        )
        self.finished = counter("requests_finished", "Sequences that ended, by how", "reason")
        self.cancelled = counter("requests_cancelled", "Sequences whose client went away")
        self.rejected = counter("requests_rejected", "Sequences refused for load")
        self.hopeless = counter(
            "requests_hopeless", "Sequences refused because no instance could keep their class's target"
        )
        self.failed = counter("requests_failed", "Sequences that ended in another error")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens accepted")
        self.output_tokens = TokenCounter(registry, "output_tokens", "Tokens delivered to clients")
        self.num_choices = histogram("request_choices", "Choices for each prompt of a request", _TOKENS[:9])
        self.ttft_s = histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token", _LATENCY_S
        )
        self.itl_s = TokenHistogram(
            registry, "inter_token_latency_seconds", "Gap between two tokens of a sequence", _GAP_S
        )
        self.e2e_s = histogram(
            "request_duration_seconds", "From the request's arrival to its last token", _LATENCY_S
        )
        self._rule_changes = counter(
            "rule_changes", "Changes of the live configuration, by outcome", "outcome"
        )
        for outcome in ("taken", "refused"):
            self._rule_changes.labels(outcome)
        for reason in ("stop", "length", "abort"):
            self.finished.labels(reason)
        aliases = [
            Alias(self.finished, "request_success", {"reason": "finished_reason"}),
            Alias(self.prompt_tokens, "prompt_tokens"),
            Alias(self.output_tokens, "generation_tokens"),
            Alias(self.num_choices, "request_params_n"),
            Alias(self.ttft_s, "time_to_first_token_seconds"),
            Alias(self.itl_s, "inter_token_latency_seconds"),
            Alias(self.itl_s, "time_per_output_token_seconds"),
            Alias(self.e2e_s, "e2e_request_latency_seconds"),
        ]
        registry.register(VllmNames(aliases, model))

    def rules_changed(self, outcome: str) -> None:
        self._rule_changes.labels(outcome).inc()


class RequestMetrics:
    """From the timelines of requests: placing, hand-over, SLO attainment, failures survived."""

    def __init__(self, registry: CollectorRegistry, model: str = "") -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"baton_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"baton_{name}", text, buckets=buckets, registry=registry)

        self._queue_s = histogram(
            "placement_wait_seconds", "From the request for a place to the place", _LATENCY_S
        )
        self._prefill_s = histogram("prefill_seconds", "From the place to the first token", _LATENCY_S)
        self._decode_s = histogram("decode_seconds", "From the first token to the last", _LATENCY_S)
        self._served_s = histogram("served_seconds", "From the place to the last token", _LATENCY_S)
        self._tpot_s = histogram(
            "time_per_output_token_seconds", "A request's mean gap after its first token", _GAP_S
        )
        self._num_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._num_output = histogram("request_output_tokens", "Output tokens of a request", _TOKENS)
        self._max_tokens = histogram("request_max_tokens", "Output tokens that a request asked for", _TOKENS)
        self._lost = counter("attempts_lost", "Attempts that went on elsewhere: an instance died or drained")
        self._transfers = counter("kv_transfers", "Hand-overs from prefill to decode", "transport")
        self._bytes = counter("kv_transfer_bytes", "KV handed over", "transport")
        self._first_byte_s = histogram(
            "kv_first_byte_seconds", "From the grant to the end of the first write", _LATENCY_S
        )
        self._exposed_s = histogram(
            "kv_transfer_exposed_seconds",
            "How long decode, having the first token, waited for KV",
            _EXPOSED_S,
        )
        self._prefill_queue_s = histogram(
            "prefill_queue_seconds", "From the grant to the first step with the prompt", _LATENCY_S
        )
        self._slo = counter(
            "slo_requests",
            "Requests by service class, and whether both of its targets were met",
            "slo_class",
            "attained",
        )
        self._good_tokens = counter(
            "slo_good_tokens", "Output tokens of requests that met their class's targets", "slo_class"
        )
        self._route_tokens = counter("route_tokens", "Tokens by HTTP route and kind", "route", "kind")
        self._adapter_requests = counter("adapter_requests", "Sequences that had an adapter", "adapter")
        self._adapter_tokens = counter("adapter_tokens", "Tokens by adapter and kind", "adapter", "kind")
        self._route_ttft_s = Histogram(
            "baton_route_time_to_first_token_seconds",
            "From the request for a place to the first token, by HTTP route",
            ("route",),
            buckets=_LATENCY_S,
            registry=registry,
        )
        aliases = [
            Alias(self._queue_s, "request_queue_time_seconds"),
            Alias(self._prefill_s, "request_prefill_time_seconds"),
            Alias(self._decode_s, "request_decode_time_seconds"),
            Alias(self._served_s, "request_inference_time_seconds"),
            Alias(self._tpot_s, "request_time_per_output_token_seconds"),
            Alias(self._num_prompt, "request_prompt_tokens"),
            Alias(self._num_output, "request_generation_tokens"),
            Alias(self._max_tokens, "request_params_max_tokens"),
            Alias(self._max_tokens, "request_max_num_generation_tokens"),
        ]
        registry.register(VllmNames(aliases, model))

    def observe(self, timeline: Timeline) -> None:
        """A cluster.ingress.telemetry.timeline.Observe."""
        for attempt in timeline.attempts:
            if attempt.placed_at is not None:
                self._queue_s.observe(attempt.placed_at - attempt.started_at)
            if attempt.lost:
                self._lost.inc()
            if (handed := attempt.handed_over) is not None:
                times = handed.times
                self._transfers.labels(times.transport).inc()
                self._bytes.labels(times.transport).inc(handed.num_bytes)
                self._first_byte_s.observe(times.first_byte_s)
                self._exposed_s.observe(times.exposed_s)
                self._prefill_queue_s.observe(times.queue_s)
        self._observe_whole(timeline)
        name, good = timeline.request.slo.name, attained(timeline)
        self._slo.labels(name, str(good).lower()).inc()
        self._slo.labels(
            name, str(not good).lower()
        )  # so that a ratio of the two has both from the first request on
        self._good_tokens.labels(name).inc(timeline.num_output if good else 0)
        self._observe_route(request_context.route.get(), timeline)
        if adapter := adapter_name(timeline.request.adapter):
            self._adapter_requests.labels(adapter).inc()
            self._adapter_tokens.labels(adapter, "prompt").inc(len(timeline.request.prompt))
            self._adapter_tokens.labels(adapter, "output").inc(timeline.num_output)

    def _observe_route(self, route: str, timeline: Timeline) -> None:
        if (first_at := first_token_at(timeline)) is not None:
            self._route_ttft_s.labels(route).observe(first_at - timeline.started_at)
            self._route_tokens.labels(route, "prompt").inc(len(timeline.request.prompt))
        self._route_tokens.labels(route, "output").inc(timeline.num_output)

    def _observe_whole(self, timeline: Timeline) -> None:
        request, first_at = timeline.request, first_token_at(timeline)
        placed_at = next((a.placed_at for a in timeline.attempts if a.placed_at is not None), None)
        if placed_at is None or first_at is None:
            return
        self._prefill_s.observe(first_at - placed_at)
        self._decode_s.observe(timeline.ended_at - first_at)
        self._served_s.observe(timeline.ended_at - placed_at)
        if timeline.num_output > 1:
            self._tpot_s.observe((timeline.ended_at - first_at) / (timeline.num_output - 1))
        self._num_prompt.observe(len(request.prompt))
        self._num_output.observe(timeline.num_output)
        self._max_tokens.observe(request.sampling.max_tokens)


class InstanceMetrics(Collector):
    """What the scheduler knows of the instances, as of the last `update`. Several ingresses all say the same."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model
        self._status: Status | None = None
        registry.register(self)

    def update(self, status: Status | None) -> None:
        """Take the scheduler's figures. None means that it does not answer."""
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        yield GaugeMetricFamily(
            "baton_scheduler_up", "Does the scheduler answer this ingress?", float(status is not None)
        )
        if status is None:
            return
        yield GaugeMetricFamily("baton_queued_requests", "Requests that wait for a place", status.num_queued)
        yield GaugeMetricFamily(
            "baton_accepting", "Would a request be answered now?", float(not status.why_not)
        )
        yield CounterMetricFamily(
            "baton_instances_hung", "Instances given up because a rank or a step did not end", status.num_hung
        )
        yield _by_role(status)
        yield from pool_metrics(status)
        for name, fact in _FACTS.items():
            metric = fact.family(f"baton_instance_{name}", ("address", "role"))
            for one in status.instances:
                metric.add_metric((one.address, role_of(one)), fact.of(one))
            yield metric
        yield _start(status)
        yield _imbalance(status)
        yield from self._as_vllm(status)

    def _as_vllm(self, status: Status) -> Iterator[Metric]:
        for name, ours in _VLLM_FACTS.items():
            fact = _FACTS[ours]
            metric = fact.family(f"vllm:{name}", ("model_name", "engine"))
            for one in status.instances:
                metric.add_metric((self._model, one.address), fact.of(one))
            if name == "num_requests_waiting":
                metric.add_metric((self._model, "scheduler"), status.num_queued)
            yield metric


def role_of(instance: InstanceStatus) -> str:
    if instance.prefills and instance.decodes:
        return "both"
    return "prefill" if instance.prefills else "decode"


def _by_role(status: Status) -> Metric:
    metric = GaugeMetricFamily("baton_instances", "Living instances, by role", labels=("role",))
    for role in ("prefill", "decode", "both"):
        metric.add_metric((role,), sum(role_of(one) == role for one in status.instances))
    return metric


def _start(status: Status) -> Metric:
    metric = GaugeMetricFamily(
        "baton_instance_start_seconds",
        "How long it has taken to start, by phase; with several ranks those of the slowest",
        labels=("address", "role", "phase"),
    )
    for one in status.instances:
        for phase, seconds in one.start.phases:
            metric.add_metric((one.address, role_of(one), phase), seconds)
    return metric


def _imbalance(status: Status) -> Metric:
    metric = GaugeMetricFamily(
        "baton_instance_expert_imbalance_ratio",
        "Load of the busiest of the ranks that share a layer's experts, by the mean",
        labels=("address", "role", "layer"),
    )
    for one in status.instances:
        for layer, imbalance in one.expert_imbalance:
            metric.add_metric((one.address, role_of(one), str(layer)), imbalance)
    return metric


@dataclass(frozen=True, slots=True)
class _Fact:
    """One figure of each instance. With `grows` it never falls but with a restart."""

    text: str
    of: Callable[[InstanceStatus], float]
    grows: bool = False

    def family(self, name: str, labels: tuple[str, ...]) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if self.grows else GaugeMetricFamily
        return kind(name, self.text, labels=labels)


_FACTS = {
    "requests_running": _Fact("Sequences that compute", lambda i: i.num_running),
    "requests_waiting": _Fact("Sequences that wait for blocks or for a step", lambda i: i.num_waiting),
    "queued_prompt_tokens": _Fact(
        "Prompt tokens to be computed, reported and reserved", lambda i: i.queued_tokens
    ),
    "kv_blocks": _Fact("KV blocks", lambda i: i.num_blocks),
    "kv_blocks_free": _Fact("KV blocks that can be had at once", lambda i: i.free_blocks),
    "kv_usage_ratio": _Fact(
        "Share of the KV blocks that is in use", lambda i: 1.0 - i.free_blocks / max(1, i.num_blocks)
    ),
    "prompt_tokens_per_second": _Fact("Measured rate of recent steps with prompts", lambda i: i.tokens_per_s),
    "step_seconds": _Fact("Smoothed duration of recent steps", lambda i: i.step_s),
    "decode_step_error_ratio": _Fact(
        "Mean error of predicted durations of steps without prompts", lambda i: i.steps.decode.error
    ),
    "prompt_step_error_ratio": _Fact(
        "Mean error of predicted durations of steps with prompts", lambda i: i.steps.prompt.error
    ),
    "expert_moves": _Fact(
        "Experts that were put where their ranks are loaded more evenly", lambda i: i.expert_moves, grows=True
    ),
    "start_read_bytes": _Fact(
        "Bytes of weights that its ranks read when it started", lambda i: i.start.bytes_read
    ),
    "start_read_bytes_per_second": _Fact(
        "Rate at which they were read and packed", lambda i: i.start.read_bytes_per_s
    ),
    "leaving": _Fact("Is it draining?", lambda i: i.leaving),
    "defective": _Fact("Has its self-check found its block accounting broken?", lambda i: bool(i.defect)),
    "live_grants": _Fact("Rights to write into its pool that are open", lambda i: i.work.live_grants),
    "grants": _Fact("Rights to write into its pool that it has given", lambda i: i.work.grants, grows=True),
    "fences": _Fact("Writers that had to be shut out", lambda i: i.work.fences, grows=True),
    "steps": _Fact("Engine steps", lambda i: i.work.steps, grows=True),
    "replayed_steps": _Fact(
        "Of these, steps replayed from CUDA graphs", lambda i: i.work.replayed_steps, grows=True
    ),
    "out_of_memory_steps": _Fact(
        "Steps for which there was no memory, planned again with less",
        lambda i: i.work.out_of_memory_steps,
        grows=True,
    ),
    "draft_tokens": _Fact("Draft tokens that steps have computed", lambda i: i.work.draft_tokens, grows=True),
    "accepted_tokens": _Fact("Of these, what was sampled then", lambda i: i.work.accepted_tokens, grows=True),
    "computed_tokens": _Fact(
        "Tokens computed, prompts and outputs", lambda i: i.work.computed_tokens, grows=True
    ),
    "preemptions": _Fact(
        "Sequences that lost their blocks to others",
        lambda i: i.work.preempted,
        grows=True,
    ),
    "returns": _Fact(
        "Of these, sequences whose KV was read back from a lower tier",
        lambda i: i.work.returned,
        grows=True,
    ),
    "pinned_blocks": _Fact("Blocks that clients have pinned", lambda i: i.work.sessions.pinned_blocks),
    "cut_pins": _Fact(
        "Pins that ended early, so that tenants keep to their parts",
        lambda i: i.work.sessions.cut,
        grows=True,
    ),
    "prefetched_sessions": _Fact(
        "Sessions read back before their next turn", lambda i: i.work.sessions.prefetched, grows=True
    ),
    "prefix_queried_tokens": _Fact(
        "Known tokens of the sequences that came", lambda i: i.work.prefix_queried_tokens, grows=True
    ),
    "prefix_hit_tokens": _Fact(
        "Of these, tokens found in the device's prefix cache", lambda i: i.work.prefix_hit_tokens, grows=True
    ),
    "tier_saved_blocks": _Fact("Blocks saved to lower tiers", lambda i: i.tiers.saved, grows=True),
    "tier_host_hit_blocks": _Fact(
        "Blocks read back from host memory", lambda i: i.tiers.host_hits, grows=True
    ),
    "tier_disk_hit_blocks": _Fact("Blocks read back from disk", lambda i: i.tiers.disk_hits, grows=True),
    "tier_missed_blocks": _Fact(
        "Blocks that a lower tier was thought to have", lambda i: i.tiers.missed, grows=True
    ),
}

_VLLM_FACTS = {
    # vLLM's metric: the key in `_FACTS` of what it shows
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "kv_cache_usage_perc": "kv_usage_ratio",
    "gpu_cache_usage_perc": "kv_usage_ratio",
    "prefix_cache_queries": "prefix_queried_tokens",
    "prefix_cache_hits": "prefix_hit_tokens",
    "num_preemptions": "preemptions",
}
