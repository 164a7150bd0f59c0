"""Earlier choices, in a small JSON file below the user's cache directory.

It only saves time: a file that is damaged, foreign or not writable costs a measurement and a line in the log."""

import logging
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from core.user_cache import user_cache
from core.whole_files import replace_file

_log = logging.getLogger(__name__)


class RememberedChoice(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str
    medians_us: dict[str, float]
    """The medians of every backend that was tried and found right."""


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["baton attention choices 1"] = "baton attention choices 1"
    choices: dict[str, RememberedChoice] = {}


def default_path() -> Path:
    return user_cache() / "attention.json"


class ChoiceFile:
    """Processes may share it: it is replaced as a whole, and of two that write at once the later one's choice is kept."""

    def __init__(self, path: Path) -> None:
        self._path, self._ignored = path, False

    def find(self, key: str) -> RememberedChoice | None:
        return self._read().get(key)

    def add(self, key: str, choice: RememberedChoice) -> None:
        content = _Content(choices={**self._read(), key: choice})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, f"{content.model_dump_json(indent=1)}\n".encode())
        except OSError as error:
            _log.warning("measured attention choices are not kept in %s: %s", self._path, error)

    def _read(self) -> dict[str, RememberedChoice]:
        try:
            return _Content.model_validate_json(self._path.read_bytes()).choices
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            if not self._ignored:
                reason = str(error).splitlines()[0]
                _log.warning("measured attention choices in %s are ignored: %s", self._path, reason)
            self._ignored = True
            return {}
