"""What one ingress records of its requests: metrics, the last hour and what has ended always, spans where a collector is
configured."""

from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from prometheus_client import CollectorRegistry

from cluster.ingress.telemetry.ended_requests import EndedRequests
from cluster.ingress.telemetry.last_hour import LastHour
from cluster.ingress.telemetry.last_minute import Recent
from cluster.ingress.telemetry.metrics import IngressMetrics, InstanceMetrics, RequestMetrics
from cluster.ingress.telemetry.timeline import Observe, all_of
from cluster.ingress.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """The observers of one ingress. `observe` is called with every request's timeline. Call `close` at the end."""

    registry: CollectorRegistry
    ingress: IngressMetrics
    instances: InstanceMetrics
    recent: Recent
    last_hour: LastHour
    ended: EndedRequests
    observe: Observe
    close: Callable[[], None]


def make_observers(model: str, otlp_endpoint: str = "") -> Observers:
    """Make the observers. An empty endpoint means no tracing."""
    registry, recent, last_hour, ended = CollectorRegistry(), Recent(), LastHour(), EndedRequests()
    ingress, instances = IngressMetrics(registry, model), InstanceMetrics(registry, model)
    every = [RequestMetrics(registry, model).observe, recent.observe, last_hour.observe, ended.observe]
    tracing = Tracing(OTLPSpanExporter(endpoint=otlp_endpoint), model) if otlp_endpoint else None
    if tracing is not None:
        every.append(tracing.observe)
    return Observers(
        registry=registry,
        ingress=ingress,
        instances=instances,
        recent=recent,
        last_hour=last_hour,
        ended=ended,
        observe=all_of(*every),
        close=(lambda: None) if tracing is None else tracing.close,
    )
