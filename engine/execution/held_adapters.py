"""A rank's adapters beside those of its start: loaded and given up while steps run."""

import logging

from core.config.adapter_config import AdapterPlace, HoldAdapters, adapter_name
from core.errors import BatonError, ConfigError
from models.causal_model import CausalModel
from models.lora.adapter import read_within

_log = logging.getLogger(__name__)


class HeldAdapters:
    """For one call at a time, on any thread."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._held: set[str] = set()

    def hold(self, asked: HoldAdapters) -> dict[str, str]:
        """Have the adapters that are asked for and no others, but for those of the start. Returns why not, by key. What is given
        up must be in no step."""
        for key in self._held - {place.key for place in asked.adapters}:
            self._model.adapters.drop(key)
            self._held.discard(key)
        failed: dict[str, str] = {}
        for place in asked.adapters:
            if place.key in self._held:
                continue
            try:
                self._load(place, asked)
            except BatonError as error:
                failed[place.key] = str(error)
            except Exception as error:
                _log.exception("cannot load the adapter %s", place.key)
                failed[place.key] = f"{type(error).__name__}: {error}"
        return failed

    def _load(self, place: AdapterPlace, asked: HoldAdapters) -> None:
        name = adapter_name(place.key)
        adapter = read_within(name, place.folder, asked.folders, asked.max_rank, self._model.spec)
        if adapter.key != place.key:
            raise ConfigError(
                f"adapter {name!r}: the files in {place.folder} are others here, or have changed meanwhile"
            )
        self._model.adapters.load(adapter)
        self._held.add(place.key)
