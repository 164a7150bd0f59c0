"""Where ranks find each other: a file on one host, or a store that the instance keeps for several hosts.

The store speaks over `net/channel.py`: both sides prove a secret of this start before a key is read or written. It lives as long
as the ranks, since communicators may ask it again when they first speak to a peer."""

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgpack
import torch.distributed as dist

from core.errors import ProtocolError, ReplicaLost
from engine.ranks.rank_messages import Meeting
from net.channel import Channel, Identity, Listener, connect
from net.tls import SecretTls, Tls

log = logging.getLogger(__name__)

_WAIT_S = 300.0
_LOAD_S = 600.0


def join(meeting: Meeting) -> Any:
    """Return the torch.distributed Store where the ranks meet. Raises ReplicaLost, ProtocolError."""
    if meeting.secret:
        return RemoteStore(meeting)
    return dist.FileStore(meeting.place)  # pyright: ignore[reportPrivateImportUsage]


def wait_for_all(store: Any, what: str, rank: int, num_ranks: int) -> None:
    """Wait until all ranks have come to `what`, for longer than a collective would: one may load its weights for minutes more
    than another. Raises RuntimeError."""
    store.set(f"{what}-{rank}", "1")
    store.wait([f"{what}-{other}" for other in range(num_ranks)], timedelta(seconds=_LOAD_S))


def _tls(meeting: Meeting) -> Tls | None:
    return SecretTls(meeting.secret) if meeting.is_encrypted else None


class StoreFile:
    """A file without a name, for ranks on this host. The kernel drops it with the last process that has it open."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("baton-ranks")

    @property
    def meeting(self) -> Meeting:
        return Meeting(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class StoreServer:
    """Keys and values of one start, on a thread of its own from construction until `close`."""

    def __init__(self, host: str, *, is_encrypted: bool = True) -> None:
        self._values: dict[str, bytes] = {}
        self._meeting = Meeting("", secrets.token_bytes(32), is_encrypted)
        self._loop = asyncio.new_event_loop()
        self._changed, self._closing = asyncio.Condition(), asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(host, started),), name="baton-rank-store"
        )
        self._thread.daemon = True
        self._thread.start()
        started.wait()

    @property
    def meeting(self) -> Meeting:
        return self._meeting

    def close(self) -> None:
        """Idempotent."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
            self._loop.close()

    async def _run(self, host: str, started: threading.Event) -> None:
        listener = Listener(
            host,
            self._meeting.secret,
            self._serve,
            lambda why: log.warning("refused a rank: %s", why),
            tls=_tls(self._meeting),
        )
        self._meeting = replace(self._meeting, place=listener.address)
        listener.start(Identity(listener.address, "store", os.getpid()))
        started.set()
        await self._closing.wait()
        await listener.close()

    async def _serve(self, channel: Channel) -> None:
        try:
            while True:
                packed, _ = await channel.recv()
                words: Any = msgpack.unpackb(packed)
                await channel.send(await self._answer(*words))
        except (ReplicaLost, ProtocolError) as error:
            log.debug("%s", error)

    async def _answer(self, kind: str, keys: Sequence[str], value: Any = b"", wanted: Any = b"") -> Any:
        """Return what the keys have in the end; None where they were not there in time."""
        values = self._values
        async with self._changed:
            match kind:
                case "wait":
                    return await self._wait(keys, value)
                case "check":
                    return all(key in values for key in keys)
                case "count":
                    return len(values)
                case "delete":
                    return values.pop(keys[0], None) is not None
                case "set" | "append" | "add" | "swap":
                    self._change(kind, keys[0], value, wanted)
                case _:
                    raise ProtocolError(f"the store knows no {kind!r}")
            self._changed.notify_all()
            return values.get(keys[0], wanted)

    async def _wait(self, keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        values = self._values
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(lambda: all(key in values for key in keys))
        except TimeoutError:
            return None
        return [values[key] for key in keys]

    def _change(self, kind: str, key: str, value: Any, wanted: bytes) -> None:
        old = self._values.get(key, b"")
        match kind:
            case "set":
                self._values[key] = value
            case "append":
                self._values[key] = old + value
            case "add":
                self._values[key] = str(int(old or b"0") + value).encode()
            case _:  # swap
                if old == wanted:
                    self._values[key] = value


class RemoteStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """A torch.distributed Store at an instance's StoreServer. For any thread, one call at a time.

    Methods have the names by which torch's C++ calls them. Keep it as long as communicators may use it."""

    def __init__(self, meeting: Meeting) -> None:
        """Raises ReplicaLost, ProtocolError."""
        super().__init__()
        self._meeting = meeting
        self._clones: list[RemoteStore] = []
        """References to the clones that C++ holds, since C++ keeps no Python object alive."""
        self._lock, self._loop = threading.Lock(), asyncio.new_event_loop()
        identity = Identity("", "rank", os.getpid())
        try:
            dialled = connect(meeting.place, meeting.secret, identity, tls=_tls(meeting))
            self._channel = self._loop.run_until_complete(dialled)
        except BaseException:
            self._loop.close()
            raise

    def clone(self) -> "RemoteStore":
        self._clones.append(RemoteStore(self._meeting))
        return self._clones[-1]

    def close(self) -> None:
        for store in self._clones:
            store.close()
        self._channel.close()
        self._loop.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        return self._wait([key], _WAIT_S)[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", [key], value))

    def append(self, key: str, value: bytes) -> None:
        self._ask("append", [key], value)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = (
            value if isinstance(value, bytes) else value.encode() for value in (expected_value, desired_value)
        )
        return self._ask("swap", [key], desired, expected)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=_WAIT_S)) -> None:
        self._wait(keys, timeout.total_seconds())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._wait(keys, _WAIT_S)

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def deleteKey(self, key: str) -> bool:
        return self._ask("delete", [key])

    def getNumKeys(self) -> int:
        return self._ask("count", [])

    def _wait(self, keys: list[str], timeout_s: float) -> list[bytes]:
        found = self._ask("wait", keys, timeout_s)
        if found is None:
            raise dist.DistStoreError(f"no rank has said {', '.join(keys)} within {timeout_s:g} s")
        return found

    def _ask(self, *words: Any) -> Any:
        with self._lock:
            return self._loop.run_until_complete(self._exchange(words))

    async def _exchange(self, words: Sequence[Any]) -> Any:
        await self._channel.send(words)
        packed, _ = await self._channel.recv()
        return msgpack.unpackb(packed)
