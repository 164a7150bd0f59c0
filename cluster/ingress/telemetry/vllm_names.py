"""Shows metrics under the names that vLLM gives them."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class Alias:
    """One of our metrics under vLLM's name. `labels` maps ours to theirs."""

    ours: Collector
    name: str
    labels: dict[str, str] | None = None


class VllmNames(Collector):
    """Copies what our metrics hold on each scrape, so that nothing is counted twice on a token's way."""

    def __init__(self, aliases: list[Alias], model: str) -> None:
        self._aliases, self._model = aliases, model

    def collect(self) -> Iterator[Metric]:
        for alias in self._aliases:
            (ours,) = alias.ours.collect()
            renamed = alias.labels or {}
            copy = Metric(f"vllm:{alias.name}", ours.documentation, ours.type)
            for sample in ours.samples:
                labels = {renamed.get(name, name): value for name, value in sample.labels.items()}
                name = copy.name + sample.name.removeprefix(ours.name)
                copy.add_sample(name, {"model_name": self._model, **labels}, sample.value)
            yield copy


class LoraInfo(Collector):
    """Says which adapters requests have now, as gateways that route by adapters ask: in labels. The value is the time."""

    def __init__(self, most: int, in_use: Callable[[], Sequence[str]]) -> None:
        """`most`: how many there can be at once. `in_use` returns the names of those that requests have."""
        self._most, self._in_use = most, in_use

    def collect(self) -> Iterator[Metric]:
        labels = {"max_lora": str(self._most), "running_lora_adapters": ",".join(self._in_use())}
        labels["waiting_lora_adapters"] = ""  # what waits for a place counts as what runs
        info = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters of requests that run or wait", labels=list(labels)
        )
        info.add_metric(list(labels.values()), time.time())
        yield info
