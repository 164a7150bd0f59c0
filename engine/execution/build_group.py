"""Builds an instance's rank from a model's folder and a configuration: loads weights, makes the pool, binds the runner."""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from core.config.cluster_config import EngineConfig, ModelConfig
from core.kv import RankPool
from core.ports import LayerSink, WorkerGroup
from core.start_timer import StartTimer
from device.port import PoolMemory
from engine.execution.batch.image_rows import make_image_rows
from engine.execution.batch.step_memory import HostSteps, StepMemory
from engine.execution.drafting.draft_setup import make_proposer
from engine.execution.drafting.proposing import Proposer, Proposing
from engine.execution.encoder_runner import EncoderRunner
from engine.execution.expert_load import counted
from engine.execution.freeing import freeing
from engine.execution.graphs.graph_capture import Capture, cuda_capture
from engine.execution.graphs.graph_sizes import GraphSizes
from engine.execution.graphs.make_graphs import make_graphs
from engine.execution.graphs.step_graphs import StepGraphs
from engine.execution.graphs.warm_up import Step, warm_up
from engine.execution.held_adapters import HeldAdapters
from engine.execution.inline_group import InlineGroup
from engine.execution.kept_model import KeptModel
from engine.execution.launching_group import LaunchingGroup
from engine.execution.pools.kv_pool import DevicePool, KVPool
from engine.execution.pools.resident_pool import ResidentPool
from engine.execution.runner import Runner
from engine.execution.sampling.grammar_masks import GrammarMasks
from engine.execution.sampling.grammar_matcher import GuidanceMatchers
from engine.execution.sampling.step_sampling import StepSampler
from engine.sizing.devices import choose_device
from engine.sizing.pool_size import PoolSize
from kernels.cpu.pages import Arena, taken_from
from models.causal_model import CausalModel
from models.families.table import read_spec
from models.pooling.readout import Readout
from models.registry import Encode, LoadOptions, load_encoder, load_model

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GeneratingModel:
    """A model, with the adapters that it has beside those of its start, and what makes its grammars' masks."""

    model: CausalModel
    adapters: HeldAdapters
    matchers: GuidanceMatchers


LoadedModel = GeneratingModel | tuple[Encode, Readout]
"""What a rank computes with: a model that generates, or an encoder and what reads its output."""


def build_group(
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    size: PoolSize,
    memory: memoryview | PoolMemory,
    sink: LayerSink | None,
    *,
    timer: StartTimer | None = None,
    kept: KeptModel[LoadedModel] | None = None,
) -> WorkerGroup:
    """Build the only rank of an instance, in this process. Its KV pool is `memory`, the host's or a GPU's. `timer` hears of its
    phases, and goes on with `pool`. `kept` has the model of an earlier group, or gets this one's. Raises ConfigError."""
    torch.set_num_threads(size.num_threads)
    device, kept = choose_device(engine.device), kept or KeptModel[LoadedModel]()
    build = _Build(folder, engine, size, device, timer or StartTimer("pool"), kept)
    return build.encoding_group() if size.encodes else build.generating_group(memory, sink)


@dataclass(frozen=True, slots=True)
class _Build:
    folder: Path
    engine: EngineConfig
    size: PoolSize
    device: torch.device
    timer: StartTimer
    kept: KeptModel[LoadedModel]

    @property
    def place(self) -> RankPool:
        return self.size.pools[0]

    @property
    def num_state_blocks(self) -> int:
        return self.place.shard.layout.state_blocks

    def encoding_group(self) -> WorkerGroup:
        kernels, weights = self.engine.kernels, self.size.weights
        load = partial(load_encoder, self.folder, self.size.dtype, self.device)
        loaded = self.kept.model(
            partial(load, kernels=kernels, weights=weights, timer=self.timer), self.timer
        )
        assert isinstance(loaded, tuple), "an encoder stays one"
        encode, readout = loaded
        self.timer.begin("pool")
        return InlineGroup(partial(freeing, EncoderRunner(encode, readout, self.device).step))

    def generating_group(self, memory: memoryview | PoolMemory, sink: LayerSink | None) -> WorkerGroup:
        timer, device = self.timer, self.device
        has = self.kept.model(self._load, timer)
        assert isinstance(has, GeneratingModel), "a model that generates stays one"
        loaded, matchers = has.model, has.matchers
        timer.begin("pool")
        pool, capture = self._pool_in(memory), cuda_capture(device)
        graphs = self._graphs(loaded, pool, capture)
        with timer.within("grammars"):
            grammars = GrammarMasks(matchers, puts_off=not self.num_state_blocks)
        with timer.within("vision"):
            images = make_image_rows(self.folder, loaded, device)
        proposer = self._proposer(loaded)
        # Each step's tokens are known on the host before the next ones are proposed: nothing is launched ahead of that.
        ahead = memory if isinstance(memory, PoolMemory) and proposer is None else None
        runner = Runner(
            loaded,
            pool,
            self.engine.block_size,
            sink,
            graphs,
            sampler=StepSampler(loaded, grammars),
            num_state_blocks=self.num_state_blocks,
            steps=self._steps(ahead),
            on_hidden=proposer.hear if proposer is not None else None,
            images=images,
        )
        step = runner.step
        if proposer is not None:
            step = Proposing(step, proposer, self.num_state_blocks).step
        if capture is not None:
            self._warm_up(step)
        if ahead is not None:
            finish = partial(freeing, counted(runner.finish, loaded))
            return LaunchingGroup(runner, finish, ahead.poller, grammars, has.adapters)
        return InlineGroup(partial(freeing, counted(step, loaded)), grammars, has.adapters)

    def _load(self) -> GeneratingModel:
        size = self.size
        # Begun here, so that a thread reads the tokenizer while the weights are loaded.
        matchers = GuidanceMatchers(self.folder, read_spec(self.folder, size.implementation).vocab_size)
        # Its memory is its own: a mapping that has a part of another model is given back when that one goes, too.
        with taken_from(Arena()):
            loaded = load_model(
                self.folder, size.dtype, self.device, options=self._options(), timer=self.timer
            )
        return GeneratingModel(loaded, HeldAdapters(loaded), matchers)

    def _options(self) -> LoadOptions:
        engine, size = self.engine, self.size
        return LoadOptions(
            kernels=engine.kernels,
            deterministic=engine.deterministic,
            block_size=engine.block_size,
            kv_dtype=size.shard.layout.dtype,
            weights=size.weights,
            implementation=size.implementation,
            load_format=size.load_format,
            packed_cache=size.packed_cache,
            max_context_tokens=size.max_context_tokens,
            taps=size.draft.taps if size.draft is not None else (),
            adapters=size.adapters,
        )

    def _pool_in(self, memory: memoryview | PoolMemory) -> DevicePool:
        if isinstance(memory, PoolMemory):
            return ResidentPool(self.place.shard, self.place.num_blocks, memory, self.device)
        return host_pool(self.place, memory)

    def _graphs(self, model: CausalModel, pool: DevicePool, capture: Capture | None) -> StepGraphs | None:
        engine, most = self.engine, self.size.max_context_tokens
        asked = GraphSizes.of(engine, hand_over=self.size.hands_over)
        with self.timer.within("graphs"):
            graphs, said = make_graphs(model, pool, engine.block_size, most, asked, capture)
        if said:
            _log.info("%s", said)
        return graphs

    def _proposer(self, target: CausalModel) -> Proposer | None:
        size, num_blocks = self.size, self.place.num_blocks
        with self.timer.within("draft"):
            return make_proposer(size, self.engine, target, num_blocks, self.device)

    def _steps(self, ahead: PoolMemory | None) -> StepMemory | HostSteps:
        if ahead is None:
            return HostSteps(self.device)
        return StepMemory(ahead.device, self.device, self.engine.max_batch_tokens)

    def _warm_up(self, step: Step) -> None:
        with self.timer.within("first steps"):
            warm_up(
                step,
                max_tokens=self.engine.max_batch_tokens,
                max_seqs=self.engine.max_num_seqs,
                max_context_tokens=self.size.max_context_tokens,
                num_blocks=self.place.num_blocks,
                block_size=self.engine.block_size,
                num_state_blocks=self.num_state_blocks,
            )


def host_pool(place: RankPool, memory: memoryview) -> KVPool:
    """Make a rank's pool in its instance's memory, the host's."""
    buffer = memory[place.base_bytes : place.base_bytes + place.num_bytes]
    return KVPool(place.shard, place.num_blocks, buffer)
