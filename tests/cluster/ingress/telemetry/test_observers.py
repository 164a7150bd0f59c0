"""A disaggregated request's story: metrics and spans say what the hand-over was."""

from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from prometheus_client import CollectorRegistry

from cluster.ingress.telemetry import request_context
from cluster.ingress.telemetry.last_minute import MAX_REQUESTS, Recent
from cluster.ingress.telemetry.metrics import RequestMetrics
from cluster.ingress.telemetry.timeline import Attempt, Timeline, all_of, attained
from cluster.ingress.telemetry.tracing import Tracing
from core.messages import HandedOver, HandoverTimes
from core.types import CacheHints, Request, Route, SamplingParams, Slo
from tests.cluster.instance.instance_world import World
from tests.cluster.instance.test_instances import reference  # noqa: F401


def timeline(*, ttft_s: float = 0.1, end_s: float = 1.0, error: str = "") -> Timeline:
    request = Request(
        id="r",
        prompt=(1, 2, 3),
        sampling=SamplingParams(max_tokens=8),
        reply_to="f",
        slo=Slo(name="chat", ttft_s=0.5, tpot_s=0.2),
        hints=CacheHints(session="run-17"),
    )
    times = HandoverTimes("shm", 0.01, 0.02, 0.005)
    first = Attempt(
        number=0,
        started_at=10.0,
        route=Route("d0", "p0"),
        placed_at=10.01,
        first_token_at=None,
        ended_at=10.05,
        handed_over=None,
        lost="d0",
    )
    second = Attempt(
        number=1,
        started_at=10.05,
        route=Route("d1", "p0"),
        placed_at=10.06,
        first_token_at=10.0 + ttft_s,
        ended_at=10.0 + end_s,
    )
    second.handed_over = HandedOver("r", 1, 4096, times)
    return Timeline(
        request=request,
        started_at=10.0,
        attempts=[first, second],
        num_output=6,
        ended_at=10.0 + end_s,
        error=error,
    )


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


def test_attributes_are_those_of_the_conventions_and_the_clients_trace_goes_on() -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    operations = {one.value for one in gen_ai_attributes.GenAiOperationNameValues}
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "m")
    token = request_context.traceparent.set("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    tracing.observe(timeline(error="lost"))
    request_context.traceparent.reset(token)
    tracing.observe(timeline())
    tracing.close()
    failed, fine = (span for span in exporter.get_finished_spans() if span.name == "text_completion m")
    assert {name for name in fine.attributes if name.startswith("gen_ai.")} <= known
    assert fine.attributes["gen_ai.operation.name"] in operations
    assert failed.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert failed.parent.span_id == 0xB7AD6B7169203331
    assert "error.type" in failed.attributes
    assert "error.type" not in fine.attributes
    assert fine.parent is None
    assert fine.attributes["gen_ai.conversation.id"] == "run-17"


def test_the_last_minute_by_class_and_link() -> None:
    recent = Recent()
    for story in (timeline(), timeline(end_s=3.0), timeline(error="full")):
        recent.observe(story)
    (chat,) = recent.classes(now=12.0)
    assert (chat.name, chat.attainment, chat.goodput_per_s) == ("chat", 1 / 3, 1 / 60)
    assert chat.ttft_p50_s == pytest.approx(0.1)
    assert chat.tpot_p99_s == pytest.approx(2.9 / 5)
    (link,) = recent.links(now=12.0)
    assert (link.source, link.target, link.transport) == ("p0", "d1", "shm")
    assert (link.bytes_per_s, link.exposed_p50_s) == (3 * 4096 / 60, 0.005)
    assert recent.classes(now=100.0) == []
    for _ in range(MAX_REQUESTS + 1):
        recent.observe(timeline(end_s=1.0))
    assert recent.classes(now=21.0)[0].requests_per_s == MAX_REQUESTS / 10.0, (
        "of more than it keeps, the rate of what it keeps"
    )


def test_requests_with_an_adapter_are_counted_by_its_name() -> None:
    registry, story = CollectorRegistry(), timeline()
    observe = RequestMetrics(registry).observe
    observe(story)
    observe(replace(story, request=replace(story.request, adapter="team/sql@12ab")))
    value = registry.get_sample_value
    assert value("baton_adapter_requests_total", {"adapter": "team/sql"}) == 1
    assert value("baton_adapter_tokens_total", {"adapter": "team/sql", "kind": "prompt"}) == 3
    assert value("baton_adapter_tokens_total", {"adapter": "team/sql", "kind": "output"}) == 6
    assert value("baton_adapter_requests_total", {"adapter": ""}) is None


def test_routes_are_told_apart() -> None:
    registry, recent, exporter = CollectorRegistry(), Recent(), InMemorySpanExporter()
    tracing = Tracing(exporter, "m")
    observe = all_of(RequestMetrics(registry).observe, recent.observe, tracing.observe)
    for route, story in (("/v1/messages", timeline()), ("/v1/batches", timeline(error="full"))):
        token = request_context.route.set(route)
        observe(story)
        request_context.route.reset(token)
    tracing.close()
    value = registry.get_sample_value
    assert value("baton_route_tokens_total", {"route": "/v1/messages", "kind": "prompt"}) == 3
    assert value("baton_route_tokens_total", {"route": "/v1/batches", "kind": "output"}) == 6
    assert value("baton_route_time_to_first_token_seconds_count", {"route": "/v1/messages"}) == 1
    batches, messages = recent.routes(now=12.0)
    assert (messages.name, messages.attainment, messages.output_tokens_per_s) == ("/v1/messages", 1.0, 0.1)
    assert messages.ttft_p99_s == pytest.approx(0.1)
    assert (batches.name, batches.attainment) == ("/v1/batches", 0.0)
    roots = [span for span in exporter.get_finished_spans() if span.name == "text_completion m"]
    assert [span.attributes["http.route"] for span in roots] == ["/v1/messages", "/v1/batches"]


def test_spans_nest_and_carry_the_transfer() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "m")
    tracing.observe(timeline())
    tracing.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans["text_completion m"]
    assert set(spans) == {"text_completion m", "queue", "prefill", "kv_transfer", "decode"}
    assert all(span.parent.span_id == root.context.span_id for span in spans.values() if span is not root)
    assert root.start_time == 10_000_000_000
    assert root.start_time <= spans["queue"].start_time <= spans["decode"].end_time <= root.end_time
    assert spans["kv_transfer"].attributes["baton.transport"] == "shm"
    assert spans["kv_transfer"].end_time - spans["kv_transfer"].start_time == 5_000_000
    assert root.attributes["gen_ai.usage.output_tokens"] == 6


async def test_a_real_hand_over_is_told_to_the_ingress(reference) -> None:  # noqa: F811
    folder, _ = reference
    seen: list[Timeline] = []
    world = World(folder, observe=all_of(seen.append))
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
    assert (
        story.started_at <= attempt.placed_at <= attempt.first_token_at <= attempt.ended_at <= story.ended_at
    )
