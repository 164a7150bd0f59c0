"""What an instance and its ranks say to each other: msgpack in frames of a u32 length, over a socket that nobody else can reach.

A rank gets a RankSetup, then StepPlans, with Relocates between them, and HoldAdapters at any time. It sends Ready, and then for
each plan its layers (where a work is pushed) and a StepResult, and at any time MaskReady, Beat and what answers HoldAdapters.
RankFailed is its last message if it fails."""

import asyncio
import socket
import struct
from asyncio import StreamReader, StreamWriter
from dataclasses import dataclass
from typing import Any

from core.config.adapter_config import HoldAdapters
from core.errors import ProtocolError
from core.kv import RankPool
from core.plan import StepPlan, StepResult
from core.reports import StartTimes
from engine.execution.graphs.graph_sizes import NO_GRAPHS, GraphSizes
from engine.sizing.head_setup import HeadSetup
from net.codec import decode_one_of, encode
from parallel.mesh import Mesh
from parallel.moves import Move

_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks find each other (`rendezvous.py`)."""

    place: str = ""
    """A file's path, or `host:port` of their instance's store."""
    secret: bytes = b""
    """This start's secret, for a store at an address."""
    is_encrypted: bool = False
    """Whether the store takes TLS, by the authority that belongs to the secret."""


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """How a rank reaches the memory that its pool lies in. Without a path and a handle it takes that from its own device."""

    num_bytes: int
    path: str = ""
    """Where it can be mapped, if it is the host's."""
    handle: bytes = b""
    """By which the rank's device opens it, if it is a device's."""
    offset: int = 0
    """Where it begins in what is behind the handle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    rank: int
    mesh: Mesh
    folder: str
    """The model's folder."""
    dtype: str
    weights: str
    load_format: str
    implementation: str
    adapters: tuple[tuple[str, str], ...]
    """The names of adapters, and their folders."""
    max_context_tokens: int
    device: str
    kernels: str
    deterministic: bool
    num_threads: int
    pools: tuple[RankPool, ...]
    """The pools of all ranks. This rank's pool lies in `memory`."""
    memory: MemoryPlace
    packed_cache: str = "none"
    """`ModelConfig.packed_cache`."""
    num_spare: int = 0
    """The number of slots for more copies of experts, over all ranks that share a layer's."""
    address: str = "127.0.0.1"
    """Where other ranks reach this one's host."""
    max_batch_tokens: int = 0
    """The most tokens of a step."""
    max_num_seqs: int = 1
    """The most sequences of a step."""
    graphs: GraphSizes = NO_GRAPHS
    """Which steps to capture."""
    head: HeadSetup | None = None
    """What makes draft tokens beside the model. None: the ranks make none."""
    meeting: Meeting = Meeting()
    """Where the ranks find each other, as the group says."""
    beat_s: float = 0.5
    """How often to send a Beat, as the group says."""


@dataclass(frozen=True, slots=True)
class Relocate:
    """Experts of these layers change their slots before the next plan."""

    layers: tuple[tuple[int, tuple[Move, ...]], ...]


@dataclass(frozen=True, slots=True)
class Ready:
    start: StartTimes
    """From where it had its setup."""
    peak_bytes: int
    """The most resident memory that it has had."""
    graphs: str = ""
    """What is to be said of its steps: whether they are captured, or why not. Empty: nothing."""


@dataclass(frozen=True, slots=True)
class LayerReady:
    step: int
    layer: int


@dataclass(frozen=True, slots=True)
class MaskReady:
    """The sample behind this many tokens of the sequence was put off, and can be made now."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Beat:
    """The rank's process runs, and a thread of it gets the interpreter."""


@dataclass(frozen=True, slots=True)
class AdaptersRefused:
    """The answer to HoldAdapters: (key, why) of those that the rank does not hold."""

    refused: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RankFailed:
    reason: str


TO_RANK = {kind.__name__: kind for kind in (RankSetup, StepPlan, Relocate, HoldAdapters)}
FROM_RANK = {
    kind.__name__: kind
    for kind in (Ready, LayerReady, MaskReady, Beat, StepResult, AdaptersRefused, RankFailed)
}


def frame(message: Any) -> bytes:
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


def read_frame(sock: socket.socket, kinds: dict[str, type[Any]]) -> Any | None:
    """Read a frame, and wait for it. Returns None at the end of the stream. Raises ProtocolError, and OSError for a broken
    stream."""
    head = _read(sock, _LENGTH.size)
    if not head:
        return None
    return decode_one_of(kinds, _read(sock, _LENGTH.unpack(head)[0]))


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            if data:
                raise ProtocolError("the stream ended inside a frame")
            return b""
        data += piece
    return bytes(data)


async def open_streams(sock: socket.socket) -> tuple[StreamReader, StreamWriter]:
    """Open streams for conversations on an event loop, over a socket of either family."""
    is_local = sock.family == socket.AF_UNIX
    connect = asyncio.open_unix_connection if is_local else asyncio.open_connection
    return await connect(sock=sock, limit=_BUFFER_BYTES)


async def next_frame(reader: StreamReader, kinds: dict[str, type[Any]]) -> Any:
    """Read the next frame. Raises asyncio.IncompleteReadError at the end of the stream, ProtocolError, and OSError for a broken
    one."""
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return decode_one_of(kinds, await reader.readexactly(size))
