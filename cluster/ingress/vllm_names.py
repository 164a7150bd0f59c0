"""Shows metrics under the names that vLLM gives them."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class Alias:
    """One of our metrics under vLLM's name. `labels` maps ours to theirs."""

    ours: Counter | Histogram
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
