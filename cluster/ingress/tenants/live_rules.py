"""Rules that change while the server runs: `serve.live_file` and the files of keys, read again whenever one of them changes.

What is read is taken over as a whole or not at all; until it is, the rules before it hold."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import yaml

from cluster.ingress.tenants.access import Access, read_rules
from core.config.cluster_config import ClusterConfig, overlay
from core.errors import ConfigError
from core.file_states import FileStates, file_states

log = logging.getLogger(__name__)

PERIOD_S = 1.0
"""The time between two looks."""


class LiveRules:
    """Keeps `access` at the files' rules while `run` runs."""

    def __init__(self, config: ClusterConfig) -> None:
        """Read the rules. Raises ConfigError."""
        self._config = config
        self._files: set[str] = set()
        self._seen: FileStates = {}
        """The states from before the files were read, so that a change meanwhile is seen."""
        self.access = Access(read_rules(self._read()))

    async def run(self, changed: Callable[[str], None]) -> None:
        """Run for as long as the server lives. Returns at once where no file is configured. `changed` is called with "taken" or
        "refused"."""
        while self._files:
            await asyncio.sleep(PERIOD_S)
            states = await asyncio.to_thread(file_states, self._files | self._seen.keys())
            if states != self._seen:
                self._seen = states
                changed(await self._reload())

    async def _reload(self) -> Literal["taken", "refused"]:
        try:
            config = await asyncio.to_thread(self._read)
            rules = await asyncio.to_thread(read_rules, config)
            if self.access.asks_for_keys and not rules.asks_for_keys:
                raise ConfigError("no key would be left, and everybody let in: restart the server for that")
        except ConfigError as error:
            log.error("the changed live configuration is refused, the old one holds: %s", error)
            return "refused"
        self.access.replace(rules)
        classes, tenants = ", ".join(config.slo_classes), ", ".join(config.tenants) or "none"
        log.info("new live configuration: slo_classes %s; tenants %s", classes, tenants)
        return "taken"

    def _read(self) -> ClusterConfig:
        config = self._config
        if live_file := config.serve.live_file:
            self._seen |= file_states([live_file])
            config = overlay(config, _read_yaml(live_file))
        named = [live_file, config.serve.api_keys_file, *(t.keys_file for t in config.tenants.values())]
        self._files = {name for name in named if name}
        self._seen |= file_states(self._files - {live_file})
        return config


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.live_file: cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"serve.live_file: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"serve.live_file: {path} must hold slo_classes and tenants")
    return content or {}
