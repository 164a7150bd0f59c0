"""Copies of sealed KV blocks in a buddy's host memory, so that what a decode instance has computed outlives it.

The scheduler names the buddy. One batch is on its way at a time, and only what the lower tiers have just saved is sent. So a
buddy that is slow, or none, costs copies and nothing else. After a loss the request is placed at the buddy, which restores the
blocks from its host tier like any other prefix."""

import asyncio
import logging
from collections import deque

from core.messages import Buddy, Message, Replica, Replicas, ReplicasKept
from core.ports import Clock, Mail
from engine.tiers.tier_store import TierStore

log = logging.getLogger(__name__)

_BATCH_BYTES = 1 << 20
_MAX_WAITING_BYTES = 256 << 20
_ANSWER_S = 5.0


class Replicator:
    """Both sides of one decode instance's replicas. `run` must be running."""

    def __init__(self, mail: Mail, clock: Clock, store: TierStore) -> None:
        self._mail, self._clock, self._store = mail, clock, store
        self._buddy = ""
        self._waiting: deque[Replica] = deque()
        self._waiting_bytes = 0
        self._filled = asyncio.Event()
        self._kept = asyncio.Event()
        store.on_saved = self._saved

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            if not self._buddy or not self._waiting:
                self._filled.clear()
                continue
            self._kept.clear()
            self._mail.send(self._buddy, Replicas(self._batch()))
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await self._kept.wait()
            except TimeoutError:
                log.warning("the buddy %s does not answer; its copies wait", self._buddy)

    def on_message(self, sender: str, message: Message) -> bool:
        """Handle a message. Returns True when it was for this part."""
        match message:
            case Buddy(address):
                self._buddy = address
                self._filled.set()
            case Replicas(blocks):
                for block in blocks:
                    self._store.accept(block.digest, block.content)
                self._mail.send(sender, ReplicasKept(len(blocks)))
            case ReplicasKept():
                self._kept.set()
            case _:
                return False
        return True

    def on_lost(self, peer: str) -> None:
        if peer == self._buddy:
            self._buddy = ""
            self._kept.set()

    def drop(self) -> None:
        """Send no copies of what has been saved so far."""
        self._waiting.clear()
        self._waiting_bytes = 0

    def _saved(self, digest: bytes, content: bytes) -> None:
        self._waiting.append(Replica(digest, content))
        self._waiting_bytes += len(content)
        while self._waiting_bytes > _MAX_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft().content)
        self._filled.set()

    def _batch(self) -> tuple[Replica, ...]:
        batch: list[Replica] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0].content) <= _BATCH_BYTES):
            batch.append(self._waiting.popleft())
            size += len(batch[-1].content)
        self._waiting_bytes -= size
        return tuple(batch)
