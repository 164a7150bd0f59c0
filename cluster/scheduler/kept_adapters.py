"""The record of the store in which the list of the adapters that are loaded while the cluster runs outlives the cluster.

The scheduler that leads writes it at each change, and answers who has asked for one when it is stored. A scheduler that starts
reads it as if somebody told it the list: what others know is the same or later."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from cluster.store.open_store import open_store
from cluster.store.store_port import Store, StoreRecord
from core.adapter_messages import EMPTY_LIST, AdapterChanged, AdapterList
from core.config.cluster_config import ClusterConfig
from core.config.store_url import store_reader
from core.errors import StoreUnavailable

log = logging.getLogger(__name__)

_JSON = TypeAdapter(AdapterList)
Answer = tuple[str, AdapterChanged]
"""Whom to tell what has become of a change."""


class KeptAdapters:
    """Stores the latest list that it is given while `run` runs, and then lets the answers go."""

    def __init__(self, store: Store, model: str, listed: AdapterList) -> None:
        """`listed` is what the record of the model has."""
        self._store, self._id, self._listed = store, _id(model), listed
        self._stored = listed.version
        self._owed: list[Answer] = []
        self._given = asyncio.Event()

    @classmethod
    async def read(cls, store: Store, model: str, list_file: str) -> "KeptAdapters":
        """Read the list of a model, or where the store has none, that of `list_file`, which an earlier release has written. It is
        empty where neither can be read: the log says why."""
        try:
            found = await store.get(_id(model))
        except (StoreUnavailable, OSError) as error:
            log.error("the list of adapters cannot be read, and what it lists is not loaded again: %s", error)
            return cls(store, model, EMPTY_LIST)
        if found is not None:
            return cls(store, model, _parsed(found.body, "the store"))
        return cls(store, model, await asyncio.to_thread(_earlier, list_file))

    @property
    def listed(self) -> AdapterList:
        """The latest list that was given, at first the stored one."""
        return self._listed

    def keep(self, listed: AdapterList, answers: Sequence[Answer]) -> None:
        """Have the list stored, unless it was tried before, and the answers sent when that is over."""
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
            why = await self._write(listed) if listed.version != self._stored else ""
            for asker, answer in owed:
                send(asker, answer if answer.why or not why else replace(answer, why=why, status=500))

    async def _write(self, listed: AdapterList) -> str:
        """Return why it could not be stored; empty where it was."""
        try:
            await self._store.put([StoreRecord(id=self._id, kind="adapters", body=_JSON.dump_json(listed))])
        except (StoreUnavailable, OSError) as error:
            why = (
                f"the change is made, but the list of adapters could not be stored, so that a restart of the whole cluster "
                f"would undo it: {error}. Mend that, and ask for a load in place of what is loaded"
            )
            log.error("%s", why)
            return why
        self._stored = listed.version
        return ""


async def kept_adapters(config: ClusterConfig) -> KeptAdapters | None:
    """Read the list from the configuration's store; None where there is no store, or no adapter may be loaded."""
    if not config.adapters.folders or store_reader(config.serve) is None:
        return None
    model = config.model.name or config.model.path
    return await KeptAdapters.read(open_store(config.serve), model, config.adapters.list_file)


def _id(model: str) -> str:
    return f"adapters of {model}"


def _earlier(list_file: str) -> AdapterList:
    try:
        return _parsed(Path(list_file).read_bytes(), list_file) if list_file else EMPTY_LIST
    except FileNotFoundError:
        return EMPTY_LIST
    except OSError as error:
        log.error("adapters.list_file cannot be read, and what it lists is not loaded again: %s", error)
        return EMPTY_LIST


def _parsed(said: bytes, where: str) -> AdapterList:
    try:
        return _JSON.validate_json(said)
    except ValidationError:
        log.error("%s has no list of adapters that can be read, and nothing of it is loaded again", where)
        return EMPTY_LIST
