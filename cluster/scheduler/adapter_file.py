"""The file in which the list of the adapters that are loaded while the cluster runs outlives the cluster (`adapters.list_file`).

The scheduler that leads writes it at each change, and answers who has asked for one when the file has it. A scheduler that starts
reads it as if somebody told it the list: what others know is the same or later."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from core.adapter_messages import EMPTY_LIST, AdapterChanged, AdapterList
from core.whole_files import replace_file

log = logging.getLogger(__name__)

_JSON = TypeAdapter(AdapterList)
Answer = tuple[str, AdapterChanged]
"""Whom to tell what has become of a change."""


class AdapterFile:
    """Writes the latest list that it is given while `run` runs, on a thread, and then lets the answers go."""

    def __init__(self, path: Path) -> None:
        """Read the list that the file has. It is empty where there is no file, or none that can be read: the log says why."""
        self._path = path
        self._listed = self._read()
        self._written = self._listed.version
        self._owed: list[Answer] = []
        self._given = asyncio.Event()

    @property
    def listed(self) -> AdapterList:
        """The latest list that was given, at first the file's."""
        return self._listed

    def keep(self, listed: AdapterList, answers: Sequence[Answer]) -> None:
        """Have the list written, unless it was tried before, and the answers sent when that is over."""
        if answers or listed.version != self._listed.version:
            self._listed = listed
            self._owed += answers
            self._given.set()

    async def run(self, send: Callable[[str, AdapterChanged], None]) -> None:
        """Run for as long as the scheduler lives, until cancelled."""
        while True:
            await self._given.wait()
            self._given.clear()
            listed, owed, self._owed = self._listed, self._owed, []
            why = await self._write(listed) if listed.version != self._written else ""
            for asker, answer in owed:
                send(asker, answer if answer.why or not why else replace(answer, why=why, status=500))

    async def _write(self, listed: AdapterList) -> str:
        """Return why it could not be written; empty where it was."""
        try:
            await asyncio.to_thread(self._replace, _JSON.dump_json(listed, indent=1))
        except OSError as error:
            why = (
                f"the change is made, but adapters.list_file could not be written, so that a restart of the whole cluster "
                f"would undo it: {error}. Mend that, and ask for a load in place of what is loaded"
            )
            log.error("%s", why)
            return why
        self._written = listed.version
        return ""

    def _read(self) -> AdapterList:
        try:
            return _JSON.validate_json(self._path.read_bytes())
        except FileNotFoundError:
            log.info("adapters.list_file: there is no %s yet", self._path)
        except (OSError, ValidationError) as error:
            said = (
                str(error).partition("\n")[0] if isinstance(error, OSError) else "it is no list of adapters"
            )
            log.error(
                "adapters.list_file %s cannot be read, and what it lists is not loaded again: %s",
                self._path,
                said,
            )
        return EMPTY_LIST

    def _replace(self, content: bytes) -> None:
        """Replace the file in one go: whoever reads it finds the old list or the new one, also after a loss of power."""
        replace_file(self._path, content)
