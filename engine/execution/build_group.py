"""Builds an instance's rank from a model's folder and a configuration: loads weights, makes the pool, binds the runner."""

import logging
from functools import partial
from pathlib import Path

import torch

from core.config.cluster_config import EngineConfig, ModelConfig
from core.kv import RankPool
from core.ports import LayerSink, WorkerGroup
from core.start_timer import StartTimer
from device.port import PoolMemory
from engine.execution.batch.picture_rows import make_picture_rows
from engine.execution.batch.step_memory import HostSteps, StepMemory
from engine.execution.drafting.draft_setup import make_proposer
from engine.execution.drafting.proposing import Proposing
from engine.execution.encoder_runner import EncoderRunner
from engine.execution.expert_load import counted
from engine.execution.freeing import freeing
from engine.execution.graphs.graph_capture import cuda_capture
from engine.execution.graphs.graph_sizes import GraphSizes
from engine.execution.graphs.make_graphs import make_graphs
from engine.execution.graphs.warm_up import warm_up
from engine.execution.held_adapters import HeldAdapters
from engine.execution.inline_group import InlineGroup
from engine.execution.launching_group import LaunchingGroup
from engine.execution.pools.kv_pool import DevicePool, KVPool
from engine.execution.pools.mirrored_pool import MirroredPool
from engine.execution.pools.resident_pool import ResidentPool
from engine.execution.runner import Runner
from engine.execution.sampling.grammar_masks import GrammarMasks
from engine.execution.sampling.grammar_matcher import GuidanceMatchers
from engine.execution.sampling.step_sampling import Draws
from engine.sizing.devices import choose_device
from engine.sizing.pool_size import PoolSize
from models.families.table import read_spec
from models.registry import load_encoder, load_model

_log = logging.getLogger(__name__)


def build_group(
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    size: PoolSize,
    memory: memoryview | PoolMemory,
    sink: LayerSink | None,
    *,
    timer: StartTimer | None = None,
) -> WorkerGroup:
    """Build the only rank of an instance, in this process. Its KV pool is `memory`, the host's or a GPU's. `timer` hears of its
    phases, and goes on with `pool`. Raises ConfigError."""
    timer = timer or StartTimer("pool")
    torch.set_num_threads(size.num_threads)
    device = choose_device(engine.device)
    if size.encodes:
        encode, readout = load_encoder(
            folder, size.dtype, device, kernels=engine.kernels, weights=size.weights, timer=timer
        )
        timer.begin("pool")
        return InlineGroup(partial(freeing, EncoderRunner(encode, readout, device).step))
    # Begun here, so that a thread reads the tokenizer while the weights are loaded.
    matchers = GuidanceMatchers(folder, read_spec(folder, size.implementation).vocab_size)
    loaded = load_model(
        folder,
        size.dtype,
        device,
        kernels=engine.kernels,
        deterministic=engine.deterministic,
        block_size=engine.block_size,
        kv_dtype=size.shard.layout.dtype,
        weights=size.weights,
        implementation=size.implementation,
        load_format=size.load_format,
        max_context_tokens=size.max_context_tokens,
        taps=size.draft.taps if size.draft is not None else (),
        adapters=size.adapters,
        timer=timer,
    )
    timer.begin("pool")
    place = size.pools[0]
    pool = (
        ResidentPool(place.shard, place.num_blocks, memory, device)
        if isinstance(memory, PoolMemory)
        else make_pool(place, memory, device)
    )
    asked, capture = GraphSizes.of(engine, hand_over=size.hands_over), cuda_capture(device)
    with timer.within("graphs"):
        graphs, said = make_graphs(loaded, pool, engine.block_size, size.max_context_tokens, asked, capture)
    if said:
        _log.info("%s", said)
    num_state_blocks = place.shard.layout.state_blocks
    with timer.within("grammars"):
        grammars = GrammarMasks(matchers, puts_off=not num_state_blocks)
    with timer.within("vision"):
        pictures = make_picture_rows(folder, loaded, device)
    with timer.within("draft"):
        proposer = make_proposer(size.draft, engine, loaded, place.num_blocks, device, size.load_format)
    # Each step's tokens are known on the host before the next ones are guessed: nothing is launched ahead of that.
    ahead = memory if isinstance(memory, PoolMemory) and proposer is None else None
    steps = (
        StepMemory(ahead.device, device, engine.max_batch_tokens) if ahead is not None else HostSteps(device)
    )
    runner = Runner(
        loaded,
        pool,
        engine.block_size,
        sink,
        graphs,
        draws=Draws(loaded, grammars),
        num_state_blocks=num_state_blocks,
        steps=steps,
        on_hidden=proposer.hear if proposer is not None else None,
        pictures=pictures,
    )
    step = runner.step if proposer is None else Proposing(runner.step, proposer, num_state_blocks).step
    if capture is not None:
        with timer.within("first steps"):
            warm_up(
                step,
                max_tokens=engine.max_batch_tokens,
                max_seqs=engine.max_num_seqs,
                max_context_tokens=size.max_context_tokens,
                num_blocks=place.num_blocks,
                block_size=engine.block_size,
                num_state_blocks=num_state_blocks,
            )
    if ahead is not None:
        finish = partial(freeing, counted(runner.finish, loaded))
        return LaunchingGroup(runner, finish, ahead.poller, grammars, HeldAdapters(loaded))
    return InlineGroup(partial(freeing, counted(step, loaded)), grammars, HeldAdapters(loaded))


def make_pool(place: RankPool, memory: memoryview, device: torch.device) -> DevicePool:
    """Make a rank's pool in its instance's memory. Raises ConfigError."""
    buffer = memory[place.base_bytes : place.base_bytes + place.num_bytes]
    if device.type == "cpu":
        return KVPool(place.shard, place.num_blocks, buffer)
    return MirroredPool(place.shard, place.num_blocks, buffer, device)
