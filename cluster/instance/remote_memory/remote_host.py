"""An instance's memory on another host or a GPU, as the instance sees it: it asks the memory server there, and notices its end.

A memory server that has ended is lost for good. One that does not answer in time is ended. Its memory is then gone, so nothing in
it is left to be fenced, and the instance fails as a whole."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cluster.instance.remote_memory.memory_messages import (
    FROM_MEMORY,
    Answer,
    BytesArrived,
    BytesCarried,
    Corrupted,
    Ended,
    Fence,
    Forget,
    MemoryFailed,
    MemoryReady,
    MemorySetup,
    Open,
    Probe,
    RefuseGrant,
    RemoteConvert,
    RemoteEndpoint,
    RemoteWrite,
    Sent,
    Sync,
    WhenIdle,
)
from core.config.cluster_config import MailConfig
from core.errors import ConfigError, ProtocolError, ReplicaLost, TransferError
from core.kv import RankPool
from core.messages import RegionKey
from device.seam import Event
from engine.ranks.rank import Rank
from engine.ranks.rank_messages import frame, next_frame, open_streams, read_frame
from kvtransfer.copies import CopyRun, VectorRuns
from kvtransfer.transport.base import Carried, Sender
from kvtransfer.transport.shm import host_id

log = logging.getLogger(__name__)

Keep = Callable[[Sequence[MemorySetup], float], list[Rank]]
"""(setups, deadline in seconds) -> all memory servers, each waiting for its setup. Starts all or none, and blocks. Raises
ConfigError and ReplicaLost."""
START_S = 300.0


def start_memories(keep: Keep, setups: Sequence[MemorySetup], mail: MailConfig) -> tuple["RemoteHost", ...]:
    """Start all memory servers, or none. Blocks until they are ready. Raises ConfigError and ReplicaLost.

    `mail` says how long a silent memory server is believed to live."""
    deadline, hosts, found = time.monotonic() + START_S, {host_id()}, list[RemoteHost]()
    memory_servers = keep(setups, START_S)
    try:
        for memory_server, setup in zip(memory_servers, setups, strict=True):
            with suppress(OSError):  # it has ended: nothing else will be heard of it
                memory_server.sock.sendall(frame(setup))
        for memory_server, setup in zip(memory_servers, setups, strict=True):
            ready = _ready(memory_server, deadline - time.monotonic())
            found.append(RemoteHost(memory_server, setup, ready, mail, shares_host=ready.host in hosts))
            hosts.add(ready.host)
        return tuple(found)
    except BaseException:
        for memory_server in memory_servers:
            memory_server.end()
        raise


def _ready(memory_server: Rank, left_s: float) -> MemoryReady:
    memory_server.sock.settimeout(max(0.01, left_s))
    try:
        word = read_frame(memory_server.sock, FROM_MEMORY)
    except TimeoutError as error:
        raise ReplicaLost(f"{memory_server.name} is not ready in time") from error
    except OSError:
        word = None
    match word:
        case MemoryReady():
            memory_server.sock.setblocking(False)  # noqa: FBT003 (it takes no name)
            return word
        case MemoryFailed(reason):
            raise ConfigError(f"{memory_server.name} did not start: {reason}")
        case _:
            raise ReplicaLost(memory_server.obituary())


_NOTHING = Carried(0, 0.0)


class RemoteHost:
    """A kvtransfer.memory.Memory and engine.ranks.rank.Companion, with the `senders` that read the memory, and its Staging where
    it `converts`.

    All but the constructor and `end` is for the event loop's thread, after `run`."""

    def __init__(
        self,
        memory_server: Rank,
        setup: MemorySetup,
        ready: MemoryReady,
        mail: MailConfig,
        *,
        shares_host: bool,
    ) -> None:
        """`shares_host` says that another process of its instance writes from that host, since a holder's segment takes the claim
        of one only."""
        self.memory, self.converts, self.exchange = ready.memory, ready.converts, ready.exchange
        self.senders = [
            _RemoteSender(self, number, way, ready.host)
            for number, way in enumerate(ready.ways)
            if not (way.vouches and shares_host)
        ]
        self._memory_server = memory_server
        self._regions = dict(zip(setup.pools, ready.regions, strict=True))
        self._beat_s, self._timeout_s = mail.heartbeat_s, mail.peer_timeout_s
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[int]] = {}
        self._carried: dict[tuple[int, str], Carried] = {}
        """By way and endpoint, what has been carried and nobody has asked for."""
        self._out: asyncio.Queue[bytes] = asyncio.Queue()
        self._closing = self._closed = False

    def run(self, arrived: Callable[[str, int], None], corrupted: Callable[[str], None]) -> None:
        """Report to an instance's inbox what has come into the memory."""
        self._arrived, self._corrupted = arrived, corrupted
        loop = self.loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[Exception] = loop.create_future()
        self._tasks = [loop.create_task(self._converse()), loop.create_task(self._beat())]

    def end(self) -> None:
        """Kill the memory server. Blocks."""
        self._memory_server.end()

    async def lost(self) -> Exception:
        return await asyncio.shield(self._lost)

    def regions(self, pool: RankPool) -> list[RegionKey]:
        return list(self._regions[pool])

    def open(self, grant_id: str, blocks: Sequence[int]) -> None:
        self.say(Open(grant_id, tuple(blocks)))

    def when_open(self, then: Callable[[], None]) -> None:
        self._then(self.ask(Sync(0)), then)

    def refuse(self, grant_id: str) -> None:
        self.say(RefuseGrant(grant_id))

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        self._then(self.ask(WhenIdle(0, grant_id)), then)

    def ended(self, grant_id: str) -> None:
        self.say(Ended(grant_id))

    async def fence(self, writer: str, grant_id: str) -> None:
        with suppress(ReplicaLost):  # the memory went with its memory server
            await self.ask(Fence(0, writer, grant_id))

    async def push(
        self,
        sender: Sender,
        grant_id: str,
        region: RegionKey,
        runs: VectorRuns,
        source: RankPool,
        after: Sequence[Event],
    ) -> int:
        # What is to be read is there: the instance has been told so by those who wrote it.
        assert isinstance(sender, _RemoteSender)
        sources, destinations, counts = (tuple(column) for column in runs.T.tolist())
        return await self.ask(
            RemoteConvert(
                number=0,
                way=sender.number,
                grant_id=grant_id,
                region=region,
                pool=source,
                sources=sources,
                destinations=destinations,
                counts=counts,
            )
        )

    async def close(self) -> None:
        """End the memory server. Idempotent."""
        if self._closed:
            return
        self._closing = self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._memory_server.end, 1.0)
        self._fail_all(ReplicaLost("the instance has ended"))

    def say(self, word: Any) -> None:
        self._out.put_nowait(frame(word))

    def carried(self, way: int, endpoint: str) -> Carried | None:
        """Return what `Sender.carried` of the memory server has said since the last call; None where it says nothing."""
        if (found := self._carried.get((way, endpoint))) is not None:
            self._carried[way, endpoint] = _NOTHING
        return found

    def ask(self, word: Any) -> "asyncio.Future[int]":
        """Return the answer to a command, which gets its number here. Raises ReplicaLost, TransferError."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._lost.done():
            future.set_exception(self._lost.result())
            return future
        number = next(self._numbers)
        self._asked[number] = future
        self.say(replace(word, number=number))
        return future

    def _then(self, asked: "asyncio.Future[int]", then: Callable[[], None]) -> None:
        """Call `then` at the answer. A lost memory server is not reported here, since its instance fails."""
        asked.add_done_callback(
            lambda done: then() if not done.cancelled() and not done.exception() else None
        )

    async def _converse(self) -> None:
        try:
            reader, writer = await open_streams(self._memory_server.sock)
            speaking = asyncio.ensure_future(self._speak(writer))
            try:
                while True:
                    self._on_word(await next_frame(reader, FROM_MEMORY))
            finally:
                speaking.cancel()
                await asyncio.gather(speaking, return_exceptions=True)
                writer.close()
        except (asyncio.IncompleteReadError, OSError, ProtocolError) as error:
            log.debug("%s: %s", self._memory_server.name, error)
            await self._lose(await asyncio.to_thread(self._memory_server.obituary))

    async def _speak(self, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(await self._out.get())
            await writer.drain()

    async def _beat(self) -> None:
        """Ask regularly, since nothing else would tell that a memory server is stopped or cut off."""
        while not self._lost.done():
            await asyncio.sleep(self._beat_s)
            asked = self.ask(Sync(0))
            await asyncio.wait([asked], timeout=self._timeout_s)
            if not asked.done():  # or this loop was held up, and the answer is there
                await asyncio.wait([asked], timeout=self._beat_s)
            if not asked.done():
                await self._lose(f"{self._memory_server.name} has not answered for {self._timeout_s:g} s")
            elif asked.exception():
                return

    def _on_word(self, word: object) -> None:
        match word:
            case BytesArrived(grant_id, num_bytes):
                self._arrived(grant_id, num_bytes)
            case Corrupted(grant_id):
                self._corrupted(grant_id)
            case BytesCarried(way, endpoint, num_bytes, busy_s):
                before = self._carried.get((way, endpoint), _NOTHING)
                self._carried[way, endpoint] = Carried(before.num_bytes + num_bytes, before.busy_s + busy_s)
            case Answer(number, value, error, lost):
                future = self._asked.pop(number, None)
                if future is None or future.done():
                    pass  # whoever asked has gone
                elif error:
                    future.set_exception(ReplicaLost(error) if lost else TransferError(error))
                else:
                    future.set_result(value)
            case _:
                raise ProtocolError(f"{self._memory_server.name} said {type(word).__name__} out of turn")

    async def _lose(self, why: str) -> None:
        if self._closing or self._lost.done():
            return
        self._closing = True
        await asyncio.to_thread(self._memory_server.end)
        error = ReplicaLost(why)
        self._lost.set_result(error)
        self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting for it


class _RemoteSender:
    """A kvtransfer.transport.base.Sender of a memory server."""

    def __init__(self, remote: RemoteHost, number: int, way: RemoteEndpoint, host: str) -> None:
        self.name, self.vouches = way.name, way.vouches
        self.number = number
        self._remote, self._host = remote, host

    def reaches(self, region: RegionKey) -> bool:
        return region.transport == self.name and region.host in ("", self._host)

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        sources = tuple(run.source for run in runs)
        destinations = tuple(run.destination for run in runs)
        sizes = tuple(run.num_bytes for run in runs)
        await self._remote.ask(
            RemoteWrite(
                number=0,
                way=self.number,
                grant_id=grant_id,
                region=region,
                sources=sources,
                destinations=destinations,
                sizes=sizes,
            )
        )

    def carried(self, region: RegionKey) -> Carried | None:
        return self._remote.carried(self.number, region.endpoint)

    async def probe(self, region: RegionKey, num_bytes: int) -> int:
        return await self._remote.ask(Probe(0, self.number, region, num_bytes))

    def ended(self, grant_id: str) -> None:
        self._remote.say(Sent(grant_id))

    def forget(self, endpoint_owner: str) -> None:
        self._remote.say(Forget(endpoint_owner))

    async def close(self) -> None:
        """Do nothing: the memory server closes its senders when it ends."""
