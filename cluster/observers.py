"""Who hears of every request's timeline at an ingress: metrics always, an OpenTelemetry collector where one is configured."""

from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from prometheus_client import CollectorRegistry

from cluster.metrics import RequestMetrics
from cluster.timeline import Observe, all_of
from cluster.tracing import Tracing


def make_observers(
    registry: CollectorRegistry, otlp_endpoint: str, model: str
) -> tuple[Observe, Callable[[], None]]:
    """The observer, and what to call at the end. An empty endpoint: no tracing."""
    metrics = RequestMetrics(registry)
    if not otlp_endpoint:
        return metrics.observe, lambda: None
    tracing = Tracing(OTLPSpanExporter(endpoint=otlp_endpoint), model)
    return all_of(metrics.observe, tracing.observe), tracing.close
