"""What one ingress records of its requests: metrics and the last minute always, spans where a collector is configured."""

from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from prometheus_client import CollectorRegistry

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
    observe: Observe
    close: Callable[[], None]


def make_observers(model: str, otlp_endpoint: str = "") -> Observers:
    """Make the observers. An empty endpoint means no tracing."""
    registry, recent = CollectorRegistry(), Recent()
    ingress, instances = IngressMetrics(registry, model), InstanceMetrics(registry, model)
    observe = all_of(RequestMetrics(registry, model).observe, recent.observe)
    if not otlp_endpoint:
        return Observers(
            registry=registry,
            ingress=ingress,
            instances=instances,
            recent=recent,
            observe=observe,
            close=lambda: None,
        )
    tracing = Tracing(OTLPSpanExporter(endpoint=otlp_endpoint), model)
    return Observers(
        registry=registry,
        ingress=ingress,
        instances=instances,
        recent=recent,
        observe=all_of(observe, tracing.observe),
        close=tracing.close,
    )
