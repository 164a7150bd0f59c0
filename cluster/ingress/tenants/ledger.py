"""The ledger of usage, as one ingress writes it.

Each answer is written down before its client has the end. The database gets it in batches, exactly once.
A batch has numbers that the database compares (`cluster.store.usage_port`), so it may be sent again when no answer came. What a
killed ingress has written down the others of its host bring to the database."""

import asyncio
import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from cluster.ingress.tenants.use_journal import Use, UseJournal, left_by_the_dead
from cluster.store.usage_port import MINUTE_S, UsageBatch, UsageCounts, UsageStore, UsedBy
from core.clock import current_time
from core.config.store_url import sqlite_path
from core.errors import StoreUnavailable

log = logging.getLogger(__name__)

FLUSH_S = 1.0
LOOK_S = 5.0
"""How often files of dead ingresses are looked for."""
_PLACES = frozenset(("host", "hostaddr", "port", "dbname", "service"))
"""What of a URL's query says which database it is: a socket's folder stands there."""


class UsageLedger:
    """Belongs to one event loop."""

    def __init__(
        self, store: UsageStore, folder: Path | None, now: Callable[[], float] = current_time
    ) -> None:
        self._store, self._folder, self._now = store, folder, now
        self._journal = UseJournal(folder)
        self._first = 0
        """The number of the first entry that is not in the database."""
        self._used: dict[UsedBy, UsageCounts] = {}
        self._sent: UsageBatch | None = None
        """What may or may not be in the database."""
        self._flushing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    def note(
        self, counts: UsageCounts, *, tenant: str, key_id: str, model: str, slo_class: str, batch: bool
    ) -> None:
        """Write down what an answer has used. It blocks for some microseconds."""
        now = int(self._now())
        use = UsedBy(now - now % MINUTE_S, tenant, key_id, model, slo_class, batch), counts
        self._journal.write(use)
        _add(self._used, use)
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.get_running_loop().create_task(self._flush_soon())

    async def flush(self) -> None:
        """Bring all that is written down to the database. Raises StoreUnavailable."""
        async with self._lock:
            while self._sent is not None or self._used:
                if self._sent is None:
                    after = self._journal.num_entries
                    self._sent, self._used = (
                        UsageBatch(self._journal.writer, self._first, after, self._used),
                        {},
                    )
                await self._store.add_usage(self._sent)
                self._first, self._sent = self._sent.after, None
            writer = self._journal.writer
            self._journal.settled()
            self._first = 0 if self._journal.writer != writer else self._first

    async def follow_the_dead(self) -> None:
        """Bring to the database what ingresses that were killed have written down, until cancelled."""
        with contextlib.suppress(StoreUnavailable):  # a process that opens a database is slower meanwhile
            await self._store.usage_upto(self._journal.writer)
        while self._folder is not None:
            try:
                with contextlib.closing(left_by_the_dead(self._folder)) as left:
                    for writer, uses in left:
                        await self._bring(writer, uses)
            except (StoreUnavailable, OSError, ValueError) as error:
                log.warning("what a dead ingress has written down is not in the database yet: %s", error)
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Bring what is left to the database. What it does not take is in the file, for the next process."""
        if self._flushing is not None:
            self._flushing.cancel()
        try:
            await self.flush()
        except (StoreUnavailable, OSError) as error:
            log.error("usage is not in the database yet, but in %s: %s", self._folder, error)
        else:
            self._journal.close()

    async def _bring(self, writer: str, uses: dict[int, Use]) -> None:
        first, after = await self._store.usage_upto(writer), max(uses, default=-1) + 1
        while first < after:
            used: dict[UsedBy, UsageCounts] = {}
            for number, use in uses.items():
                if number >= first:
                    _add(used, use)
            first = await self._store.add_usage(UsageBatch(writer, first, after, used))

    async def _flush_soon(self) -> None:
        while self._sent is not None or self._used:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except (StoreUnavailable, OSError) as error:
                log.warning("usage is not in the database yet: %s", error)


def journal_folder(named: str, store_url: str | None) -> Path | None:
    """Return the folder of the files that outlive a killed ingress; None where no database does. Ingresses with the same database
    have the same one."""
    if store_url is None:
        return None
    if named:
        return Path(named).expanduser()
    if (path := sqlite_path(store_url)) is not None:
        return path.with_name(f"{path.name}-usage")
    parts = urlsplit(store_url)
    queried = sorted(one for one in parse_qsl(parts.query) if one[0] in _PLACES)
    place = f"{parts.hostname}:{parts.port}{parts.path}{queried or ''}"
    database = hashlib.sha256(place.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"baton-usage-{os.getuid()}-{database}"


def _add(used: dict[UsedBy, UsageCounts], use: Use) -> None:
    by, counts = use
    used[by] = used.get(by, UsageCounts()) + counts
