"""What processes do that share a card: see card_process.py. Each work goes on for some seconds and says how fast it was: in the
mean, since where processes take turns a card is one's own for longer than a step, and most steps are as if alone."""

import itertools
import statistics
import time
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.rank import BLOCK_SIZE, Rank, ahead, decode_plans, prefill_plan
from benchmarks.gpu.session import begin
from benchmarks.gpu.shapes import SHAPES
from core.kv import num_blocks_for
from device.cuda import CudaDevice
from device.poller import Poller
from device.seam import Copy, Region, SharingDevice
from device.simulated import SimulatedDevice
from engine.execution.graphs.graph_capture import CudaCapture, again
from engine.execution.graphs.graph_sizes import GraphSizes
from engine.execution.graphs.make_graphs import make_graphs
from kernels.triton.platform import INTERPRETED

_RUN_S = 0.0 if INTERPRETED else 2.0
_BATCH, _CONTEXT, _NUM_STEPS = (2, 24, 4) if INTERPRETED else (64, 1024, 256)
_PROMPT_TOKENS = 24 if INTERPRETED else 2048
_NUM_BYTES = 1 << (16 if INTERPRETED else 30)
_PIECE_BYTES, _SHORT_BYTES = (1 << 12, 1 << 8) if INTERPRETED else (8 << 20, 4 << 10)
_NUM_SHORT = 16 if INTERPRETED else 4096


class Tokens:
    """Decode steps, replayed where they can be captured."""

    @torch.inference_mode()
    def __init__(self) -> None:
        device = begin(INTERPRETED)
        blocks = num_blocks_for(_CONTEXT + _NUM_STEPS, BLOCK_SIZE)
        rank = Rank.of(SHAPES[0], _BATCH * blocks * BLOCK_SIZE, device)
        capture = again if INTERPRETED else CudaCapture(device)
        asked = GraphSizes((_BATCH,), _BATCH)
        graphs, said = make_graphs(rank.model, rank.pool, BLOCK_SIZE, _CONTEXT + _NUM_STEPS, asked, capture)
        print(said, flush=True)
        self._runner = rank.runner(_BATCH, graphs)
        self.run()  # what is compiled when it is first needed

    @torch.inference_mode()
    def run(self) -> dict[str, float]:
        until, gaps = time.perf_counter() + _RUN_S, list[float]()
        while not gaps or time.perf_counter() < until:
            ended = [at for at, _ in ahead(self._runner, decode_plans(_BATCH, _CONTEXT, _NUM_STEPS))]
            gaps += [end - start for start, end in pairwise(ended)]
        return {"step_ms": 1e3 * statistics.fmean(gaps)}


class Prompts:
    @torch.inference_mode()
    def __init__(self) -> None:
        self._runner = Rank.of(SHAPES[0], _PROMPT_TOKENS, begin(INTERPRETED)).runner(1)
        self._steps = itertools.count()
        self.run()

    @torch.inference_mode()
    def run(self) -> dict[str, float]:
        until, times = time.perf_counter() + _RUN_S, list[float]()
        while not times or time.perf_counter() < until:
            plans = (prefill_plan(step, _PROMPT_TOKENS) for step in itertools.islice(self._steps, 4))
            ended = [at for at, _ in ahead(self._runner, plans)]
            times += [end - start for start, end in pairwise(ended)]
        return {"prompt_ms": 1e3 * statistics.fmean(times)}


class Copies:
    """Copies on a stream of their own, as a memory server makes them: pieces of some megabytes, or as many short ones at once as
    tables of blocks have."""

    def __init__(self) -> None:
        self._device = _device()
        self._poller, self._stream = Poller(), self._device.stream("copies")
        self._source, self._target = (self._device.allocate(_NUM_BYTES) for _ in range(2))
        self._handle, self._offset = self._device.export(self._source)
        pinned = self._device.pinned(_NUM_BYTES)
        view = np.frombuffer(self._device.host_view(pinned, write=True), np.uint8)
        view[:] = _pattern()
        self._copy([Copy(self._source, pinned)])
        self._device.free(pinned)
        self.run_short()

    def share(self) -> dict[str, Any]:
        return {"handle": self._handle.hex(), "offset": self._offset}

    def run(self) -> dict[str, float]:
        return self._run(_pieces(self._target, self._source, _PIECE_BYTES, _NUM_BYTES // _PIECE_BYTES))

    def run_short(self) -> dict[str, float]:
        return self._run(_pieces(self._target, self._source, _SHORT_BYTES, _NUM_SHORT))

    def _run(self, copies: list[Copy]) -> dict[str, float]:
        started, num_bytes = time.perf_counter(), 0
        while not num_bytes or time.perf_counter() < started + _RUN_S:
            self._copy(copies)
            num_bytes += sum(copy.source.num_bytes for copy in copies)
        return {"gb_per_s": num_bytes / (time.perf_counter() - started) / 1e9}

    def _copy(self, copies: list[Copy]) -> None:
        self._stream.copy(copies)
        self._poller.wait([self._stream.record()])


def opened(handle: str, offset: int) -> dict[str, float]:
    """Copy what another process has written to memory of this one, and return how much of it is that, and how fast it was."""
    device, poller = _device(), Poller()
    stream, own = device.stream("copies"), device.allocate(_NUM_BYTES)
    theirs = device.open(bytes.fromhex(handle), offset + _NUM_BYTES).part(offset, _NUM_BYTES)
    pieces, times = _pieces(own, theirs, _PIECE_BYTES, _NUM_BYTES // _PIECE_BYTES), list[float]()
    for _ in range(3):
        started = time.perf_counter()
        stream.copy(pieces)
        poller.wait([stream.record()])
        times.append(time.perf_counter() - started)
    pinned = device.pinned(_NUM_BYTES)
    stream.copy([Copy(pinned, own)])
    poller.wait([stream.record()])
    found = np.frombuffer(device.host_view(pinned, write=False), np.uint8)
    alike = float((found == _pattern()).mean())
    return {"alike": alike, "gb_per_s": _NUM_BYTES / min(times) / 1e9}


def _pattern() -> npt.NDArray[np.uint8]:
    return np.tile(np.arange(256, dtype=np.uint8), _NUM_BYTES // 256)


def _device() -> SharingDevice:
    return SimulatedDevice(seed=1) if INTERPRETED else CudaDevice(0)


def _pieces(target: Region, source: Region, size: int, count: int) -> list[Copy]:
    return [Copy(target.part(at * size, size), source.part(at * size, size)) for at in range(count)]
