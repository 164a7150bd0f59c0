"""The figures of several models in one answer, each with the label `model`."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_OF_NO_MODEL = ("baton_http_requests", "baton_requests_refused", "baton_rule_changes")
"""What is also counted where no model is asked. There the label is empty."""


class JoinedMetrics(Collector):
    """vLLM's names have a label for the model already."""

    def __init__(self, of_no_model: CollectorRegistry, by_model: Mapping[str, CollectorRegistry]) -> None:
        self._of_no_model, self._by_model = of_no_model, by_model

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for metric in self._of_no_model.collect():
            if metric.name in _OF_NO_MODEL:
                _add(found, metric, "")
        for model, registry in self._by_model.items():
            for metric in registry.collect():
                if metric.name != _OF_NO_MODEL[-1]:
                    _add(found, metric, model)
        yield from found.values()


def _add(found: dict[str, Metric], metric: Metric, model: str) -> None:
    """Add a model's samples to the metric of the same name."""
    if (joined := found.get(metric.name)) is None:
        joined = found[metric.name] = Metric(metric.name, metric.documentation, metric.type)
    for sample in metric.samples:
        own = {} if "model_name" in sample.labels else {"model": model}
        joined.samples.append(sample._replace(labels=own | sample.labels))


def joined_registry(
    of_no_model: CollectorRegistry, by_model: Mapping[str, CollectorRegistry]
) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(JoinedMetrics(of_no_model, by_model))
    return registry
