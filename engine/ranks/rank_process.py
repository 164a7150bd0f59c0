"""A rank in a process of its own: `python -m engine.ranks.rank_process FD`, where FD is its socket to the instance.

It ends with the instance: the kernel kills it when its parent has died, and so does the end of the socket's stream."""

import contextlib
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch

from core.config.adapter_config import HoldAdapters
from core.garbage import leave_out_all_there_is
from core.parent_death import die_with_parent
from core.plan import StepResult
from core.ports import LayerSink
from core.start_timer import StartTimer
from device.cuda import cuda_device
from device.poller import Poller
from device.port import PoolMemory
from device.seam import DeviceOf
from engine.execution.batch.image_rows import ImageRows, make_image_rows
from engine.execution.batch.step_memory import StepMemory
from engine.execution.build_group import host_pool
from engine.execution.drafting.load_head import load_head
from engine.execution.drafting.proposing import Proposer, Proposing
from engine.execution.expert_load import counted
from engine.execution.graphs.graph_capture import Capture, CaptureOn, cuda_capture
from engine.execution.graphs.make_graphs import make_graphs
from engine.execution.graphs.step_graphs import StepGraphs
from engine.execution.graphs.warm_up import Step, meeting, warm_up
from engine.execution.held_adapters import HeldAdapters
from engine.execution.pools.kv_pool import DevicePool
from engine.execution.pools.resident_pool import ResidentPool
from engine.execution.runner import Runner
from engine.execution.sampling.grammar_masks import GrammarMasks
from engine.execution.sampling.grammar_matcher import GuidanceMatchers
from engine.execution.sampling.step_sampling import Peers, StepSampler
from engine.ranks.layer_news import LayerNews
from engine.ranks.model_part import ModelPart, load_part
from engine.ranks.pipeline_stage import StageRunner
from engine.ranks.rank_logs import log_to_instance
from engine.ranks.rank_messages import (
    TO_RANK,
    AdaptersRefused,
    Beat,
    LayerReady,
    MaskReady,
    RankFailed,
    RankSetup,
    Ready,
    Relocate,
    frame,
    read_frame,
)
from engine.ranks.rank_share import share_of
from engine.ranks.rank_steps import RankSteps, StepsAhead, StepsInTurn, Word
from engine.ranks.rendezvous import join, wait_for_all
from kernels.cpu.prepacked import WeightFormat
from kernels.select import Kernels
from models.families.table import read_spec
from models.registry import LoadOptions
from models.spec.kv_places import has_states
from models.spec.model_spec import Implementation, LoadFormat


class _Line:
    """The connection to the instance, for any thread."""

    def __init__(self, sock: socket.socket, on_beat: Callable[[], None]) -> None:
        self._sock, self._lock, self._on_beat = sock, threading.Lock(), on_beat

    def say(
        self, message: Ready | LayerReady | MaskReady | Beat | StepResult | AdaptersRefused | RankFailed
    ) -> None:
        """Raises OSError where the instance has ended."""
        with self._lock:
            self._sock.sendall(frame(message))

    def mask_ready(self, key: str, num_tokens: int) -> None:
        with contextlib.suppress(OSError):  # the thread that reads from the instance notices its end
            self.say(MaskReady(key, num_tokens))

    def beat(self, every_s: float) -> None:
        """Send Beats until the instance has ended, on a thread of their own."""

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    self.say(Beat())
                    self._on_beat()
                    time.sleep(every_s)

        threading.Thread(target=run, name="beats", daemon=True).start()


def main() -> None:
    die_with_parent()
    log_to_instance()
    # Ctrl-C reaches every process of the terminal. The instance decides when its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = serve_instance(socket.socket(fileno=int(sys.argv[1])))
    sys.stderr.flush()
    # A normal exit would take down communicators, and fail where their peers have ended already.
    os._exit(code)


def serve_instance(
    sock: socket.socket,
    device_of: DeviceOf = cuda_device,
    capture_on: CaptureOn = cuda_capture,
    on_beat: Callable[[], None] = lambda: None,
) -> int:
    """Serve until the instance ends the stream, or something fails here. Return the process' exit code. `device_of` returns a
    pool's device by its name; `capture_on` captures on the device that computes. A thread calls `on_beat` at each Beat."""
    line = _Line(sock, on_beat)
    try:
        setup = read_frame(sock, TO_RANK)
        if setup is not None:
            _serve(setup, sock, line, device_of, capture_on)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the instance has ended
    except Exception as error:
        traceback.print_exc()
        line.say(RankFailed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _serve(
    setup: RankSetup, sock: socket.socket, line: _Line, device_of: DeviceOf, capture_on: CaptureOn
) -> None:
    torch.set_num_threads(setup.num_threads)
    timer = StartTimer("meeting")
    device = torch.device(setup.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place = setup.mesh.place(setup.rank)
    speaks = place.tp == place.ep == 0  # the other tp and ep ranks sample the same tokens
    matchers = _matchers(setup) if speaks and place.pp == setup.mesh.pp - 1 else None
    store = join(setup.meeting)  # kept: communicators may ask it again when they first speak to a peer
    part = _part(setup, device, store, timer)
    timer.begin("pool")
    pool, memory = _pool(setup, device, device_of)
    news = LayerNews(line.say, memory)
    with timer.within("graphs"):
        capture = capture_on(device)
        graphs, said = _graphs(setup, part, pool, capture, store)
    with timer.within("grammars"):
        sampler = _sampler(part, matchers, line, speaks=speaks)
    with timer.within("vision"):
        images = make_image_rows(Path(setup.folder), part.model, device)
    with timer.within("draft"):
        proposer = _proposer(setup, part, device, decides=speaks)

    def try_first(step: Step) -> None:
        if capture is not None:  # as on GPUs alone
            with timer.within("first steps"):
                _warm_up(setup, step)

    steps = _steps(
        setup,
        part,
        pool,
        memory,
        try_first,
        sink=news,
        sampler=sampler,
        proposer=proposer,
        graphs=graphs,
        images=images,
    )
    adapters = HeldAdapters(part.model)
    leave_out_all_there_is()
    line.say(Ready(timer.times(), _peak_bytes(), said))
    line.beat(setup.beat_s)

    def answer(result: StepResult) -> None:
        news.settle(result.step)
        line.say(result if speaks else _unspoken(result))

    def hold(asked: HoldAdapters) -> None:
        with contextlib.suppress(OSError):  # the thread that reads from the instance notices its end
            line.say(AdaptersRefused(tuple(adapters.hold(asked).items())))

    steps.serve(_words(setup, sock, hold), lambda word: _relocate(part, word), answer)


def _unspoken(result: StepResult) -> StepResult:
    """Return what a rank says of a step that another one samples the same tokens in."""
    return StepResult(step=result.step, sampled=(), duration_s=result.duration_s, failed=result.failed)


def _words(setup: RankSetup, sock: socket.socket, hold: Callable[[HoldAdapters], None]) -> Iterator[Word]:
    """Yield the words that steps are made of. Adapters are loaded beside those, on a thread of their own."""
    while (word := read_frame(sock, TO_RANK)) is not None:
        if isinstance(word, HoldAdapters):
            threading.Thread(target=hold, args=(word,), name="adapters", daemon=True).start()
            continue
        yield word if isinstance(word, Relocate) else share_of(word, setup.pools, setup.rank)


def _part(setup: RankSetup, device: torch.device, store: Any, timer: StartTimer) -> ModelPart:
    layout = setup.pools[setup.rank].shard.layout
    return load_part(
        Path(setup.folder),
        setup.dtype,
        device,
        setup.mesh,
        rank=setup.rank,
        store=store,
        options=LoadOptions(
            kernels=cast(Kernels, setup.kernels),
            deterministic=setup.deterministic,
            block_size=layout.block_size,
            kv_dtype=layout.dtype,
            weights=cast(WeightFormat, setup.weights),
            load_format=cast(LoadFormat, setup.load_format),
            packed_cache=setup.packed_cache,
            implementation=cast(Implementation, setup.implementation),
            max_context_tokens=setup.max_context_tokens,
            taps=setup.head.taps if setup.head is not None else (),
            adapters=dict(setup.adapters),
        ),
        num_spare=setup.num_spare,
        address=setup.address,
        timer=timer,
    )


def _relocate(part: ModelPart, word: Relocate) -> None:
    part.relocate(dict(word.layers))


def _graphs(
    setup: RankSetup, part: ModelPart, pool: DevicePool, capture: Capture | None, store: Any
) -> tuple[StepGraphs | None, str]:
    """Capture decode steps on all ranks, or on none."""
    tp, experts = part.comms.tp, part.comms.experts
    if capture is not None:  # before steps are captured they are launched, so that ranks meet
        wait_for_all(store, "loaded", setup.rank, setup.mesh.size)

    def agree(is_captured: bool) -> bool:  # noqa: FBT001 (a `Callable`)
        num_without = torch.tensor(int(not is_captured), device=pool.device)
        return not experts.all_reduce(tp.all_reduce(num_without)).item()

    return make_graphs(
        part.model,
        pool,
        setup.pools[setup.rank].shard.layout.block_size,
        setup.max_context_tokens,
        setup.graphs,
        None if capture is None else _of_fixed_sizes(part, capture),
        agree=agree,
    )


def _of_fixed_sizes(part: ModelPart, capture: Capture) -> Capture:
    return lambda launch: capture(lambda: part.fixed(launch))


def _matchers(setup: RankSetup) -> GuidanceMatchers:
    """Begin to read the tokenizer, on a thread beside the start."""
    spec = read_spec(Path(setup.folder), cast(Implementation, setup.implementation))
    return GuidanceMatchers(Path(setup.folder), spec.vocab_size)


def _sampler(part: ModelPart, matchers: GuidanceMatchers | None, line: _Line, *, speaks: bool) -> StepSampler:
    tp, ep = part.comms.tp, part.comms.ep
    peers = Peers(speaks, lambda tokens: ep.all_reduce(tp.all_reduce(tokens)))
    if matchers is None:
        return StepSampler(part.model, peers=peers)
    grammars = GrammarMasks(matchers, puts_off=not has_states(part.model.spec))
    grammars.on_ready(line.mask_ready)
    return StepSampler(part.model, grammars, peers)


def _proposer(setup: RankSetup, part: ModelPart, device: torch.device, *, decides: bool) -> Proposer | None:
    """Load what drafts here. One rank decides, since kernels that each has chosen for itself may round otherwise."""
    if setup.head is None:
        return None
    tp, ep = part.comms.tp, part.comms.ep

    def agree(drafts: torch.Tensor) -> torch.Tensor:
        own = drafts if decides else torch.zeros_like(drafts)
        return ep.all_reduce(tp.all_reduce(own))

    return load_head(
        setup.head,
        part.model,
        setup.pools[setup.rank].num_blocks,
        device,
        kernels=cast(Kernels, setup.kernels),
        load_format=cast(LoadFormat, setup.load_format),
        shard=part.shard,
        agree=agree,
    )


def _steps(
    setup: RankSetup,
    part: ModelPart,
    pool: DevicePool,
    memory: PoolMemory | None,
    try_first: Callable[[Step], None],
    *,
    sink: LayerSink,
    sampler: StepSampler,
    proposer: Proposer | None,
    graphs: StepGraphs | None,
    images: ImageRows | None,
) -> RankSteps:
    """Return what executes the rank's part of plans. `try_first` gets it before it is used for any. Steps are launched ahead
    where its pool is on a device alone; but a pipeline's stages wait for each other, and a proposer for tokens on the host."""
    shard, pp = setup.pools[setup.rank].shard, part.comms.pp
    if pp.size > 1:
        stage = StageRunner(
            part.model, pool, shard, pp, pp.size, sink, sampler=sampler, graphs=graphs, images=images
        )
        try_first(stage.step)
        return StepsInTurn(counted(stage.step, part.model))
    layout, ahead = shard.layout, memory if proposer is None else None
    runner = Runner(
        part.model,
        pool,
        layout.block_size,
        sink,
        graphs,
        sampler=sampler,
        num_state_blocks=layout.state_blocks,
        steps=None if ahead is None else StepMemory(ahead.device, pool.device, setup.max_batch_tokens),
        on_hidden=None if proposer is None else proposer.hear,
        images=images,
    )
    step = runner.step if proposer is None else Proposing(runner.step, proposer, layout.state_blocks).step
    try_first(step)
    if ahead is not None:
        return StepsAhead(runner, counted(runner.finish, part.model), ahead.poller)
    return StepsInTurn(counted(step, part.model))


def _warm_up(setup: RankSetup, step: Step) -> None:
    layout = setup.pools[setup.rank].shard.layout
    warm_up(
        meeting(step),
        max_tokens=setup.max_batch_tokens,
        max_seqs=setup.max_num_seqs,
        max_context_tokens=setup.max_context_tokens,
        num_blocks=min(pool.num_blocks for pool in setup.pools),
        block_size=layout.block_size,
        num_state_blocks=layout.state_blocks,
        num_groups=setup.mesh.dp,
    )


def _pool(
    setup: RankSetup, device: torch.device, device_of: DeviceOf
) -> tuple[DevicePool, PoolMemory | None]:
    """Return the rank's pool and, where that lies on a device, its memory there."""
    own, place = setup.pools[setup.rank], setup.memory
    if place.path:
        return host_pool(own, _map(place.path, place.num_bytes)), None
    where, size = device_of(setup.device), own.num_bytes
    whole = where.open(place.handle, place.offset + place.num_bytes) if place.handle else where.allocate(size)
    memory = PoolMemory(where, whole.part(place.offset + own.base_bytes, size), Poller())
    return ResidentPool(own.shard, own.num_blocks, memory, device), memory


def _map(path: str, num_bytes: int) -> memoryview:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return memoryview(mmap.mmap(descriptor, num_bytes))
    finally:
        os.close(descriptor)


def _peak_bytes() -> int:
    """Return the most resident memory so far. getrusage's figure begins with the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
