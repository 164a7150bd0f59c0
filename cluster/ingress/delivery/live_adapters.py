"""The adapters that requests may name beside those of the configuration, as one ingress knows them from the scheduler's list.

Invariant: an adapter that retires is in use here, as the schedulers are told, until the last request that has it is over."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.ingress.delivery.questions import Questions
from core.adapter_messages import EMPTY_LIST, AdapterList, AdaptersUsed, LoadAdapter, UnloadAdapter
from core.config.adapter_config import ServedAdapter, adapter_name
from core.errors import ReplicaLost, RequestError
from core.messages import AdapterChanged, Message
from core.ports import Mail
from core.types import Request
from net.schedulers import Schedulers

_LOAD_S = 300.0
"""Longer than the scheduler waits for instances to load, and to give up what one of them refuses."""
_MARGIN_S = 30.0


class LiveAdapters:
    def __init__(
        self,
        mail: Mail,
        schedulers: Schedulers,
        questions: Questions,
        request_timeout_s: float,
        *,
        is_on: bool,
    ) -> None:
        """`is_on`: the list may have any. `request_timeout_s` is the longest time for which a request may need one."""
        self._mail, self._schedulers, self._questions, self._is_on = mail, schedulers, questions, is_on
        self._unload_s = request_timeout_s + _MARGIN_S
        self._list, self._heard = EMPTY_LIST, not is_on
        self._served: dict[str, ServedAdapter] = {}
        self._listed = set[str]()
        """The keys that were ever listed."""
        self._running = Counter[str]()

    @property
    def served(self) -> dict[str, ServedAdapter]:
        """By name. It changes as the list does."""
        return self._served

    @property
    def in_use(self) -> tuple[str, ...]:
        """Return the names of the adapters that requests have, sorted."""
        return tuple(sorted({adapter_name(key) for key in self._running if key}))

    @property
    def why_not(self) -> str:
        """Return why it is not known which there are; empty where it is."""
        return "" if self._heard else "the list of adapters is not known yet"

    def greet(self, scheduler: str) -> None:
        """Tell a scheduler that knows nothing of this ingress."""
        if self._is_on:
            self._mail.send(scheduler, self._list)
            self._mail.send(scheduler, self._used())

    def hear(self, listed: AdapterList) -> None:
        self._heard = True
        if listed.version <= self._list.version:
            return
        self._list = listed
        self._listed |= {each.key for each in listed.adapters}
        self._served.clear()
        for each in listed.adapters:
            if each.state == "serving":
                self._served[adapter_name(each.key)] = ServedAdapter(each.key, each.folder)
        self._tell_all()

    async def load(self, key: str, folder: str, *, in_place: bool) -> None:
        """Have every instance load it, and every ingress know it. Raises RequestError, saying who refuses it and why, and
        ReplicaLost."""
        await self._change(partial(LoadAdapter, key=key, folder=folder, in_place=in_place), _LOAD_S)

    async def unload(self, name: str) -> None:
        """Take no more requests for it, wait for those that run, and have every instance give it up. Raises RequestError and
        ReplicaLost."""
        await self._change(partial(UnloadAdapter, name=name), self._unload_s)

    async def _change(self, question: Any, timeout_s: float) -> None:
        if not (scheduler := self._schedulers.first):
            raise ReplicaLost("the scheduler is not known yet")
        answer: AdapterChanged = await self._questions.ask(scheduler, question, "the scheduler", timeout_s)
        if answer.status == 503:
            raise ReplicaLost(answer.why)
        if answer.why:
            raise RequestError(answer.why, status=answer.status, field="lora_name")

    def renewed(self, request: Request) -> Request:
        """Return the request with the adapter's later revision, where its own has retired since it was read and nothing here runs
        with that. Raises RequestError where the adapter is unloaded."""
        key = request.adapter
        served = self._served.get(adapter_name(key))
        if key not in self._listed or self._running[key] or (served and served.key == key):
            return request
        if served is None:
            raise RequestError(
                f"the model {adapter_name(key)!r} does not exist any more: it was unloaded",
                field="model",
                status=404,
                code="model_not_found",
            )
        return replace(request, adapter=served.key)

    @contextmanager
    def running(self, key: str) -> Generator[None]:
        """Count a request while it runs."""
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
                if key in self._retiring():
                    self._tell_all()

    def _retiring(self) -> set[str]:
        return {each.key for each in self._list.adapters if each.state == "retiring"}

    def _used(self) -> AdaptersUsed:
        return AdaptersUsed(self._list.version, tuple(sorted(self._retiring() & self._running.keys())))

    def _tell_all(self) -> None:
        message: Message = self._used()
        for scheduler in self._schedulers.living:
            self._mail.send(scheduler, message)
