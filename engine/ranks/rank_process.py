"""A rank in a process of its own: `python -m engine.ranks.rank_process FD`, where FD is its socket to the instance.

It ends with the instance: the kernel kills it when its parent has died, and so does the end of the socket's stream."""

import ctypes
import mmap
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from core.garbage import leave_out_all_there_is
from core.plan import StepPlan, StepResult
from core.ports import LayerDone
from engine.execution.build_group import make_pool
from engine.execution.expert_load import counted
from engine.execution.grammar_masks import GrammarMasks
from engine.execution.kv_pool import DevicePool
from engine.execution.runner import Runner
from engine.ranks.model_part import ModelPart, load_part
from engine.ranks.pipeline_stage import StageRunner
from engine.ranks.rank_messages import (
    TO_RANK,
    LayerReady,
    RankFailed,
    RankSetup,
    Ready,
    Relocate,
    frame,
    read_frame,
)
from engine.ranks.rank_share import RankShare, share_of
from engine.ranks.rendezvous import join
from kernels.select import Kernels
from kernels.torch.prepacked import WeightFormat
from models.spec import LoadFormat

_PR_SET_PDEATHSIG = 1


class _Sink:
    """The instance's core.ports.LayerSink, reached over the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def step_started(self, plan: StepPlan) -> LayerDone | None:
        if not any(work.push for work in plan.work):
            return None
        return lambda _, layer: self._sock.sendall(frame(LayerReady(plan.step, layer)))


def main() -> None:
    _die_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to the whole terminal; the instance says when it is over
    code = serve_instance(socket.socket(fileno=int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(code)  # communicators whose peers have ended already would not be taken down in peace


def serve_instance(sock: socket.socket) -> int:
    """Serve until the instance ends the stream, or something fails here. Returns the process's exit code."""
    try:
        setup = read_frame(sock, TO_RANK)
        if setup is not None:
            _serve(setup, sock)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the instance has ended
    except Exception as error:
        traceback.print_exc()
        sock.sendall(frame(RankFailed(f"{type(error).__name__}: {error}")))
        return 1
    return 0


def _serve(setup: RankSetup, sock: socket.socket) -> None:
    torch.set_num_threads(setup.num_threads)
    started = time.perf_counter()
    device = torch.device(setup.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    own = setup.pools[setup.rank]
    layout = own.shard.layout
    store = join(setup.meeting)  # kept: communicators may ask it again when they first speak to a peer
    part = load_part(
        Path(setup.folder),
        setup.dtype,
        device,
        setup.mesh,
        rank=setup.rank,
        store=store,
        kernels=cast(Kernels, setup.kernels),
        deterministic=setup.deterministic,
        num_spare=setup.num_spare,
        block_size=layout.block_size,
        address=setup.address,
        kv_dtype=layout.dtype,
        weights=cast(WeightFormat, setup.weights),
        load_format=cast(LoadFormat, setup.load_format),
    )
    memory = _map(setup.memory_path, setup.memory_bytes)
    pool = make_pool(own, memory, device)
    grammars = GrammarMasks(Path(setup.folder), part.model.spec.vocab_size)
    step = counted(_runner(part, pool, layout.block_size, sock, grammars), part.model)
    leave_out_all_there_is()
    sock.sendall(frame(Ready(part.bytes_read, time.perf_counter() - started, _peak_bytes())))
    place = setup.mesh.place(setup.rank)
    draws = place.tp == place.ep == 0  # the others draw the same
    while (word := read_frame(sock, TO_RANK)) is not None:
        if isinstance(word, Relocate):
            part.relocate(dict(word.layers))
            continue
        result = step(share_of(word, setup.pools, setup.rank))
        sock.sendall(
            frame(result if draws else StepResult(step=result.step, sampled=(), duration_s=result.duration_s))
        )


def _runner(
    part: ModelPart, pool: DevicePool, block_size: int, sock: socket.socket, grammars: GrammarMasks
) -> Callable[[RankShare], StepResult]:
    sink = _Sink(sock)
    if part.comms.pp.size == 1:
        runner = Runner(part.model, pool, block_size, sink, grammars=grammars)
        return lambda share: runner.step(share.plan)
    last = grammars if part.model.is_last else None
    stage = StageRunner(part.model, pool, block_size, part.comms.pp, part.comms.pp.size, sink, grammars=last)
    return lambda share: stage.step(share.plan, share.most_tokens)


def _map(path: str, num_bytes: int) -> memoryview:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return memoryview(mmap.mmap(descriptor, num_bytes))
    finally:
        os.close(descriptor)


def _peak_bytes() -> int:
    """Return the most resident memory so far. (getrusage's figure begins with the parent's.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def _die_with_parent() -> None:
    """End with the parent. The socket's end tells of a parent that died before this call."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
