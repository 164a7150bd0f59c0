"""A disaggregated request's story: metrics and spans say what the hand-over was."""

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from cluster.metrics import RequestMetrics, attained
from cluster.timeline import Attempt, Timeline, all_of
from cluster.tracing import Tracing
from core.messages import HandedOver, HandoverTimes
from core.types import Request, Route, SamplingParams, Slo
from tests.cluster.test_instances import World, reference  # noqa: F401


def timeline(*, ttft_s: float = 0.1, end_s: float = 1.0, error: str = "") -> Timeline:
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=8), "f", slo=Slo("chat", 0.5, 0.2))
    times = HandoverTimes("shm", 0.01, 0.02, 0.005)
    first = Attempt(0, 10.0, Route("d0", "p0"), 10.01, None, 10.05, None, "d0")
    second = Attempt(1, 10.05, Route("d1", "p0"), 10.06, 10.0 + ttft_s, 10.0 + end_s)
    second.handed_over = HandedOver("r", 1, 4096, times)
    return Timeline(request, 10.0, [first, second], 6, 10.0 + end_s, error)


def test_attainment_counts_both_targets_and_failures_as_misses() -> None:
    assert attained(timeline())
    assert not attained(timeline(ttft_s=0.6, end_s=1.0))
    assert not attained(timeline(end_s=3.0))
    assert not attained(timeline(error="lost"))


def test_metrics_of_a_request_that_survived_a_loss() -> None:
    registry = CollectorRegistry()
    RequestMetrics(registry).observe(timeline())
    value = registry.get_sample_value
    assert value("baton_attempts_lost_total") == 1
    assert value("baton_kv_transfer_bytes_total", {"transport": "shm"}) == 4096
    assert value("baton_kv_transfer_exposed_seconds_sum") == 0.005
    assert value("baton_slo_requests_total", {"slo_class": "chat", "attained": "true"}) == 1


def test_spans_nest_and_carry_the_transfer() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "m")
    tracing.observe(timeline())
    tracing.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans["generate m"]
    assert set(spans) == {"generate m", "queue", "prefill", "kv_transfer", "decode"}
    assert all(span.parent.span_id == root.context.span_id for span in spans.values() if span is not root)
    assert root.start_time <= spans["queue"].start_time <= spans["decode"].end_time <= root.end_time
    assert spans["kv_transfer"].attributes["baton.transport"] == "shm"
    assert spans["kv_transfer"].end_time - spans["kv_transfer"].start_time == 5_000_000
    assert root.attributes["gen_ai.usage.output_tokens"] == 6


async def test_a_real_hand_over_is_told_to_the_ingress(reference) -> None:  # noqa: F811
    folder, _ = reference
    seen: list[Timeline] = []
    world = World(folder)
    world.frontend._observe = all_of(seen.append)
    try:
        async for _ in world.frontend.generate(world.request(tuple(range(2, 40)), 6)):
            pass
    finally:
        await world.close()
    (story,) = seen
    (attempt,) = story.attempts
    assert attempt.handed_over is not None
    assert attempt.handed_over.times.transport == "loopback"
    assert attempt.handed_over.num_bytes > 0
    assert story.started_s <= attempt.placed_s <= attempt.first_token_s <= attempt.ended_s <= story.ended_s
