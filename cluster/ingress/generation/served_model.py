"""One model of those behind the door, with all that an ingress has of it."""

from dataclasses import dataclass

from cluster.ingress.delivery.generator import ChatTokenizer, Generator
from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.telemetry.observers import Observers


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    generator: Generator
    tokenizer: ChatTokenizer
    settings: ApiSettings
    observers: Observers

    @property
    def name(self) -> str:
        return self.settings.model_name
