"""OpenTelemetry spans of a request: ingress, and below it each attempt with its queue, prefill, exposed transfer and decode.

The ingress learns all of it (`timeline`), so the spans are made here, at a request's end, with their true times; nothing
is traced on the token path, and no other process exports anything. They belong to the trace that the client named in its
`traceparent` header, if it did. Attributes follow the `gen_ai.*` conventions; Baton's own begin with `baton.`."""

from collections.abc import Mapping

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.ingress.telemetry import request_context
from cluster.ingress.telemetry.timeline import Attempt, Timeline, attained, decode_at, first_token_at

_OPERATION = "text_completion"
"""The operation, whatever the route: a conversation has become one prompt before it comes here."""
_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """Makes spans. `observe` is a cluster.ingress.telemetry.timeline.Observe. `close` sends what is left."""

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "baton"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("baton")
        self._model = model

    def observe(self, timeline: Timeline) -> None:
        request = timeline.request
        root = self._tracer.start_span(
            f"{_OPERATION} {self._model}",
            context=_PROPAGATOR.extract({"traceparent": request_context.traceparent.get()}),
            kind=SpanKind.SERVER,
            start_time=_ns(timeline.started_at),
            attributes={
                "gen_ai.operation.name": _OPERATION,
                "gen_ai.provider.name": "baton",
                "gen_ai.request.model": self._model,
                "gen_ai.request.max_tokens": request.sampling.max_tokens,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.request.top_p": request.sampling.top_p,
                "gen_ai.request.seed": request.sampling.seed,
                "gen_ai.response.id": request.id,
                "gen_ai.response.model": self._model,
                "gen_ai.usage.input_tokens": len(request.prompt),
                "gen_ai.usage.output_tokens": timeline.num_output,
                "baton.request_id": request_context.request_id.get(),
                "http.route": request_context.route.get(),
                "baton.tenant": request.tenant,
                "baton.slo_class": request.slo.name,
                "baton.attained": attained(timeline),
                "baton.attempts": len(timeline.attempts),
            },
        )
        if request.hints.session:
            root.set_attribute("gen_ai.conversation.id", request.hints.session)
        if timeline.error:
            root.set_status(Status(StatusCode.ERROR, timeline.error))
            root.set_attribute("error.type", timeline.error_type)
        if (first_at := first_token_at(timeline)) is not None:
            root.set_attribute("gen_ai.response.time_to_first_chunk", first_at - timeline.started_at)
        for attempt in timeline.attempts:
            self._attempt(root, attempt, attempt.ended_at or timeline.ended_at)
        root.end(_ns(timeline.ended_at))

    def close(self) -> None:
        self._provider.shutdown()

    def _attempt(self, root: Span, attempt: Attempt, ended_at: float) -> None:
        placed_at = ended_at if attempt.placed_at is None else attempt.placed_at
        self._child(root, "queue", _ns(attempt.started_at), _ns(placed_at), {"baton.attempt": attempt.number})
        if attempt.route is None:
            return
        first_at = ended_at if attempt.first_token_at is None else attempt.first_token_at
        where = {"baton.decode": attempt.route.decode, "baton.prefill": attempt.route.prefill or "local"}
        self._child(root, "prefill", _ns(placed_at), _ns(first_at), where)
        handed, begins_at = attempt.handed_over, decode_at(attempt, ended_at)
        if begins_at is None:
            return
        if handed is not None:
            facts = {
                "baton.transport": handed.times.transport,
                "baton.bytes": handed.num_bytes,
                "baton.prefill_queue_s": handed.times.queue_s,
                "baton.first_byte_s": handed.times.first_byte_s,
                "baton.exposed_s": handed.times.exposed_s,
            }
            self._child(root, "kv_transfer", _ns(first_at), _ns(begins_at), facts)
        lost = {"baton.lost": attempt.lost} if attempt.lost else {}
        self._child(root, "decode", _ns(begins_at), _ns(ended_at), lost)

    def _child(
        self, root: Span, name: str, start_ns: int, end_ns: int, facts: Mapping[str, str | int | float]
    ) -> None:
        span = self._tracer.start_span(
            name, context=set_span_in_context(root), start_time=start_ns, attributes=facts
        )
        span.end(max(start_ns, end_ns))


def _ns(moment: float) -> int:
    """Return a moment of core.clock as OpenTelemetry wants it."""
    return round(moment * 1e9)
