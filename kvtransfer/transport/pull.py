"""Transports in which the holder fetches. The writer says over an authenticated connection what lies where. The holder asks its
ledger, moves the bytes into its own pool by whatever medium the two have (NIXL, CUDA IPC, NCCL), and answers.

This makes a fence possible where memory access cannot be revoked: nobody but the holder ever writes the pool, so a writer that is
dead, stopped or cut off can do nothing to it. The fence cuts the connection and waits until the holder's own fetch under way
(`Intake.abort`) can change the pool no more. The other way round, a holder that died may still read the source for a while, but
nobody uses what it reads.

Messages: `[grant id, sources, destinations, sizes, crc or nil, attempt]`, then `[verdict, reason]`, with a `[go]` before it where
the writer takes part (NCCL). Before the first the two media set themselves up with messages of their own: `Exchange`."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import msgpack

from core.errors import ProtocolError, ReplicaLost, TransferError
from core.kv import KVShard
from core.messages import RegionKey
from core.threads import in_thread
from kvtransfer.copies import CopyRun
from kvtransfer.transport.base import PROBE
from kvtransfer.transport.checks import check_header, destination_crc, source_crc
from kvtransfer.transport.write_admission import WriteAdmission
from kvtransfer.wire import POOL_FORMAT
from net.channel import Channel, Identity, Listener, connect
from net.tls import Tls

log = logging.getLogger(__name__)

_SETUP_S = 20.0
_STALL_S = 60.0
_MAX_MESSAGE_RUNS = 8192
SCRATCH_BYTES = 4 << 20
"""The most bytes that an `Intake` can fetch in a probe."""
_GO, _TAKEN, _REFUSED, _DAMAGED, _FAILED = "go", "taken", "refused", "damaged", "failed"
T = TypeVar("T")


class Exchange:
    """Setup messages between two media, in order, for a thread. Nothing else is on the connection meanwhile."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._loop = channel, asyncio.get_running_loop()

    def send(self, data: bytes) -> None:
        """Send a message. Raises ReplicaLost."""
        self._wait(self._channel.send(data))

    def recv(self) -> bytes:
        """Receive a message. Raises ReplicaLost and ProtocolError."""
        data: Any = msgpack.unpackb(self._wait(self._channel.recv())[0])
        if not isinstance(data, bytes):
            raise ProtocolError(f"a setup message was expected from {self._channel.peer.address}")
        return data

    def _wait(self, work: Any) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(_SETUP_S)
        except TimeoutError as error:
            raise ReplicaLost(f"{self._channel.peer.address} does not go on setting up") from error


class Intake(Protocol):
    """The holder's end of one medium to one writer. All methods block and are for threads."""

    def fetch(self, runs: Sequence[CopyRun], *, scratch: bool) -> None:
        """Fetch bytes. Returns when they are in the pool, or in the scratch memory from its beginning. Raises TransferError."""
        ...

    def abort(self) -> None:
        """Wait until no fetch, also one that is under way in another thread, can change the pool any more."""
        ...

    def close(self) -> None: ...


class Outlet(Protocol):
    """The writer's end of one medium to one holder. All methods block and are for threads."""

    def supply(self, runs: Sequence[CopyRun], answered: threading.Event) -> None:
        """Do the writer's part while the holder fetches. `answered` completes once it has. Raises TransferError."""
        ...

    def close(self) -> None: ...


class Medium(Protocol):
    """One process's access to one way of moving bytes, with its pool known to it."""

    name: str
    host: str
    """Only peers of this host are reached; empty means any host."""
    needs_go: bool
    """Whether the writer's part may only begin when the holder has begun. A refusal would otherwise leave it waiting for a
    partner."""
    num_bytes: int
    """The bytes of its pool."""
    memory: memoryview | None
    """The pool, if the processor can read it, for checksums."""

    def take(self, exchange: Exchange) -> Intake: ...
    def give(self, exchange: Exchange) -> Outlet: ...
    def close(self) -> None: ...


class PullReceiver:
    def __init__(
        self,
        key: bytes,
        me: Identity,
        host: str,
        medium: Medium,
        admission: WriteAdmission,
        tls: Tls | None = None,
    ) -> None:
        self._medium, self._admission = medium, admission
        self._links: dict[str, set[_Incoming]] = {}
        self._threads = ThreadPoolExecutor(64, f"kv-{medium.name}")
        self._listener = Listener(
            host, key, self._serve, lambda why: log.warning("refused a KV writer: %s", why), tls=tls
        )
        self._listener.start(me)

    def region(self, shard: KVShard, num_blocks: int) -> RegionKey:
        medium = self._medium
        return RegionKey(
            transport=medium.name,
            endpoint=self._listener.address,
            name=POOL_FORMAT,
            host=medium.host,
            shard=shard,
            num_blocks=num_blocks,
        )

    def when_idle(self, grant_id: str, then: Callable[[], None]) -> None:
        self._admission.when_idle(grant_id, then)

    def ended(self, grant_id: str) -> None:
        """Do nothing: no state is kept for a grant."""

    async def fence(self, writer: str, grant_id: str) -> None:
        await asyncio.gather(*(link.abort() for link in list(self._links.get(writer, ()))))

    async def close(self) -> None:
        for links in list(self._links.values()):
            await asyncio.gather(*(link.abort() for link in list(links)))
        await self._listener.close()
        self._threads.shutdown(wait=False)
        self._medium.close()

    async def _serve(self, channel: Channel) -> None:
        writer = channel.peer.address
        link = _Incoming(channel, self._medium, self._admission, self._threads)
        links = self._links.setdefault(writer, set())
        links.add(link)
        try:
            await link.run()
        except ReplicaLost as error:
            log.info("KV writer %s is gone: %s", writer, error)
        except (ProtocolError, TransferError, ValueError, TypeError, msgpack.UnpackException) as error:
            log.error("KV from %s by %s: %s; its connection is cut", writer, self._medium.name, error)
        except Exception:
            log.exception("KV from %s by %s; its connection is cut", writer, self._medium.name)
        finally:
            await link.abort()
            links.discard(link)
            if not links:
                self._links.pop(writer, None)


class _Incoming:
    """One writer's connection, on the event loop's thread; fetches run on others."""

    def __init__(
        self, channel: Channel, medium: Medium, admission: WriteAdmission, threads: ThreadPoolExecutor
    ) -> None:
        self._channel, self._medium, self._admission, self._threads = channel, medium, admission, threads
        self._intake: Intake | None = None
        self._aborted = False

    async def run(self) -> None:
        exchange = Exchange(self._channel)
        intake = await in_thread(lambda: self._medium.take(exchange), self._threads)
        self._intake = intake
        try:
            while not self._aborted:
                message: Any = msgpack.unpackb((await self._channel.recv())[0])
                await self._take(intake, message)
        finally:
            await self.abort()
            await in_thread(intake.close, self._threads)

    async def abort(self) -> None:
        self._aborted = True
        self._channel.close()
        if self._intake is not None:
            await in_thread(self._intake.abort, self._threads)

    async def _take(self, intake: Intake, message: Any) -> None:
        grant_id, sources, destinations, sizes, crc, attempt = message
        check_header(grant_id, crc, attempt, sources, destinations, sizes)
        runs = [CopyRun(*run) for run in zip(sources, destinations, sizes, strict=True)]
        if any(min(run.source, run.destination, run.num_bytes) < 0 for run in runs):
            raise ProtocolError("a run with negative numbers")
        probe = grant_id == PROBE
        ranges = [(run.destination, run.num_bytes) for run in runs]
        if not probe and not self._admission.begin(grant_id, ranges):
            await self._channel.send([_REFUSED, ""])
            return
        num_bytes, damaged, reason = 0, False, ""
        try:
            if self._medium.needs_go:
                await self._channel.send([_GO, ""])
            damaged = await in_thread(lambda: self._fetch(intake, runs, crc, scratch=probe), self._threads)
            num_bytes = 0 if damaged else sum(run.num_bytes for run in runs)
        except TransferError as error:
            reason = str(error)
        finally:
            if not probe:
                self._admission.over(grant_id, num_bytes, corrupted=damaged and attempt > 0)
        await self._channel.send([_FAILED if reason else _DAMAGED if damaged else _TAKEN, reason])
        if reason:
            raise TransferError(reason)

    def _fetch(self, intake: Intake, runs: list[CopyRun], crc: int | None, *, scratch: bool) -> bool:
        """Fetch on a thread. Returns True when the bytes are not what the writer's checksum says."""
        intake.fetch(runs, scratch=scratch)
        if crc is None or scratch:
            return False
        assert self._medium.memory is not None, "refused by the writer"
        return destination_crc(self._medium.memory, runs) != crc


class PullSender:
    vouches = False

    def __init__(
        self, key: bytes, me: Identity, medium: Medium, tls: Tls | None = None, *, checksum: bool
    ) -> None:
        """Makes the sender. Raises TransferError for checksums of memory that the processor cannot read."""
        if checksum and medium.memory is None:
            raise TransferError(
                f"transfer.checksum needs a KV pool in host memory; {medium.name} moves device memory"
            )
        self.name = medium.name
        self._key, self._me, self._medium, self._tls, self._checksum = key, me, medium, tls, checksum
        self._links: dict[str, _Outgoing] = {}
        self._threads = ThreadPoolExecutor(64, f"kv-{medium.name}")

    def reaches(self, region: RegionKey) -> bool:
        return region.transport == self.name and region.host == self._medium.host

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        for start in range(0, len(runs), _MAX_MESSAGE_RUNS):
            await self._deliver(region.endpoint, grant_id, list(runs[start : start + _MAX_MESSAGE_RUNS]))

    def carried(self, region: RegionKey) -> None:
        """Return nothing: a write ends when its bytes are there."""

    async def probe(self, region: RegionKey, num_bytes: int) -> int:
        num_bytes = min(num_bytes, SCRATCH_BYTES, self._medium.num_bytes)
        await self._deliver(region.endpoint, PROBE, [CopyRun(0, 0, num_bytes)])
        return num_bytes

    def ended(self, grant_id: str) -> None:
        """Do nothing: no state is kept for a grant."""

    def forget(self, endpoint_owner: str) -> None:
        for endpoint, link in list(self._links.items()):
            if link.owner == endpoint_owner:
                del self._links[endpoint]
                link.cut()

    async def close(self) -> None:
        for link in self._links.values():
            link.cut()
        for link in list(self._links.values()):
            async with link.lock:
                await link.close(self._threads)
        self._links.clear()
        self._threads.shutdown(wait=False)
        self._medium.close()

    async def _deliver(self, endpoint: str, grant_id: str, runs: list[CopyRun]) -> None:
        link = self._links.setdefault(endpoint, _Outgoing())
        async with link.lock:
            try:
                async with asyncio.timeout(_STALL_S):
                    dial = partial(connect, endpoint, self._key, self._me, tls=self._tls)
                    await link.open(dial, self._medium, self._threads)
                    await self._send(link, grant_id, runs)
            except _Refused as refused:
                raise TransferError(str(refused)) from None
            except BaseException as error:  # a message may be half sent: the link cannot be used again
                if self._links.get(endpoint) is link:
                    del self._links[endpoint]
                link.cut()
                await asyncio.shield(link.close(self._threads))
                if isinstance(error, TimeoutError):
                    raise ReplicaLost(f"{endpoint} has not answered within {_STALL_S:g} s") from error
                raise

    async def _send(self, link: "_Outgoing", grant_id: str, runs: list[CopyRun]) -> None:
        memory = self._medium.memory if self._checksum and grant_id != PROBE else None
        crc = None if memory is None else await in_thread(lambda: source_crc(memory, runs), self._threads)
        fields = [
            [run.source for run in runs],
            [run.destination for run in runs],
            [r.num_bytes for r in runs],
        ]
        for attempt in range(2):
            await link.channel.send([grant_id, *fields, crc, attempt])
            verdict, reason = await self._answer(link, runs)
            match verdict:
                case "taken":
                    return
                case "refused":
                    raise _Refused(f"grant {grant_id} is not live any more at {link.owner}")
                case "damaged":
                    log.error("grant %s: KV arrived corrupted at %s", grant_id, link.owner)
                case _:
                    raise TransferError(f"{link.owner} could not fetch KV by {self.name}: {reason}")
        raise _Refused(f"KV arrived corrupted twice at {link.owner}")

    async def _answer(self, link: "_Outgoing", runs: list[CopyRun]) -> tuple[str, str]:
        """Return the holder's answer, while this side does its part."""
        if self._medium.needs_go:
            verdict, reason = await link.answer()
            if verdict != _GO:
                return verdict, reason
        answered = threading.Event()
        part = asyncio.ensure_future(in_thread(lambda: link.outlet.supply(runs, answered), self._threads))
        answer = asyncio.ensure_future(link.answer())
        try:
            await asyncio.wait([part, answer], return_when=asyncio.FIRST_COMPLETED)
            if part.done():
                part.result()
            return await answer
        finally:
            answered.set()
            answer.cancel()
            await asyncio.wait([part, answer])
            if not part.cancelled() and (error := part.exception()) is not None:
                log.info("KV by %s to %s: %s", self.name, link.owner, error)


class _Refused(Exception):
    """An answer after which the connection can still be used."""


class _Outgoing:
    """The connection to one endpoint, opened by the first write. The lock keeps writes apart."""

    channel: Channel
    outlet: Outlet

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.owner = ""
        self._open = self._ready = False

    async def open(
        self, dial: Callable[[], Awaitable[Channel]], medium: Medium, threads: ThreadPoolExecutor
    ) -> None:
        if not self._open:
            self.channel = await dial()
            self.owner, self._open = self.channel.peer.address, True
            exchange = Exchange(self.channel)
            self.outlet = await in_thread(lambda: medium.give(exchange), threads)
            self._ready = True

    async def answer(self) -> tuple[str, str]:
        answer: Any = msgpack.unpackb((await self.channel.recv())[0])
        verdict, reason = answer
        return str(verdict), str(reason)

    def cut(self) -> None:
        if self._open:
            self.channel.close()

    async def close(self, threads: ThreadPoolExecutor) -> None:
        self.cut()
        if self._ready:
            self._ready = False
            await in_thread(self.outlet.close, threads)
