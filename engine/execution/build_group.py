"""From a model's folder and a configuration to the ranks of an instance: loads weights, sizes the pool, binds the runner."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from core.config import EngineConfig, ModelConfig
from core.errors import ConfigError
from core.kv import KVLayout, KVShard, RankPool, lay_out, memory_bytes, num_blocks_for
from core.ports import LayerSink
from engine.execution.decode_graphs import DecodeGraphs, auto_sizes
from engine.execution.devices import choose_device
from engine.execution.expert_load import counted
from engine.execution.grammar_masks import GrammarMasks
from engine.execution.graph_capture import CudaCapture
from engine.execution.inline_group import InlineGroup
from engine.execution.kv_pool import DevicePool, KVPool
from engine.execution.mirrored_pool import MirroredPool
from engine.execution.model_dims import dims_of, shards_of
from engine.execution.runner import Runner
from kernels.torch.prepacked import WeightFormat
from models.families import read_spec
from models.model import Model
from models.registry import choose_dtype, choose_weights, load_model
from parallel.mesh import ONE_RANK, Mesh
from parallel.plans import check

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    shard: KVShard
    num_blocks: int
    max_context_tokens: int
    dtype: str
    """What the model computes in."""
    weights: WeightFormat
    """How ranks on CPUs keep matrices."""
    pools: tuple[RankPool, ...]
    """The pools of the instance's ranks."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the instance's own memory."""
        return memory_bytes(self.pools)


def size_pool(
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    mesh: Mesh = ONE_RANK,
    *,
    role: str = "instance",
    num_spare: int = 0,
    device: torch.device | None = None,
    memories: Sequence[int] = (),
) -> PoolSize:
    """How many blocks an instance has, from the model's description alone. Raises ConfigError.

    `device`: what its ranks compute on, where this process has another one. `memories`: on which of its hosts each rank is."""
    spec = read_spec(folder)
    device = device or choose_device(engine.device)
    dtype = choose_dtype(spec, model.dtype, device)
    weights = choose_weights(spec, model.dtype, model.quantization, engine.deterministic, device)
    check(dims_of(spec), mesh, role, num_spare)
    layout = _stored_as(engine.kv_dtype, spec.kv_layout(engine.block_size, dtype))
    shards = shards_of(spec, mesh, layout)
    groups = [mesh.place(rank).dp for rank in range(mesh.size)]
    block_bytes = sum(shard.pool_bytes(1) for shard, dp in zip(shards, groups, strict=True) if dp == 0)
    num_blocks = (engine.num_blocks or engine.kv_bytes // block_bytes) // mesh.dp
    if num_blocks < 2:
        raise ConfigError(
            f"engine.kv_bytes of {engine.kv_bytes} holds {num_blocks} blocks of {block_bytes} bytes"
            + (f" for each of {mesh.dp} groups of ranks" if mesh.dp > 1 else "")
        )
    max_context_tokens = model.max_context_tokens or spec.max_context_tokens
    pools = lay_out(shards, num_blocks, groups, memories)
    return PoolSize(
        shard=KVShard.whole(layout),
        num_blocks=num_blocks * mesh.dp,
        max_context_tokens=max_context_tokens,
        dtype=dtype,
        weights=weights,
        pools=pools,
    )


def build_group(
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    size: PoolSize,
    buffer: memoryview,
    sink: LayerSink | None,
) -> InlineGroup:
    """The one rank of an instance, in this process. Its KV pool is `buffer`, or a GPU's memory with a copy in `buffer`.

    Raises ConfigError."""
    torch.set_num_threads(engine.num_threads)
    device = choose_device(engine.device)
    loaded = load_model(
        folder,
        size.dtype,
        device,
        kernels=engine.kernels,
        deterministic=engine.deterministic,
        block_size=engine.block_size,
        kv_dtype=size.shard.layout.dtype,
        weights=size.weights,
    )
    pool = make_pool(size.pools[0], buffer, device)
    graphs = make_graphs(loaded, pool, engine, size.max_context_tokens)
    grammars = GrammarMasks(folder, loaded.spec.vocab_size)
    runner = Runner(loaded, pool, engine.block_size, sink, graphs, grammars=grammars)
    return InlineGroup(counted(runner.step, loaded))


def make_graphs(
    model: Model, pool: DevicePool, engine: EngineConfig, max_context_tokens: int
) -> DecodeGraphs | None:
    """As `engine.cuda_graphs` says. Raises ConfigError where sizes are named that cannot be captured, and what CUDA raises while
    it captures them; with `auto` steps are launched one kernel at a time then, so that the instance serves all the same."""
    asked = engine.cuda_graphs
    if asked == "off":
        return None
    if reason := why_no_graphs(model, pool):
        if asked != "auto":
            raise ConfigError(f"engine.cuda_graphs names sizes, but {reason}: leave it at auto")
        _log.info("decode steps are launched one kernel at a time: %s", reason)
        return None
    assert isinstance(pool, MirroredPool)
    sizes = auto_sizes(engine.max_num_seqs) if asked == "auto" else asked
    most_blocks = num_blocks_for(max_context_tokens, engine.block_size)
    try:
        return DecodeGraphs(model, pool, engine.block_size, most_blocks, sizes, CudaCapture(pool.device))
    except RuntimeError:
        if asked != "auto":
            raise
        _log.exception("decode steps are launched one kernel at a time, since capturing them has failed")
        return None


def why_no_graphs(model: Model, pool: DevicePool) -> str:
    """As a clause; empty where decode steps can be captured."""
    if pool.device.type != "cuda":
        return "CUDA graphs are captured on GPUs alone"
    if model.ops.fixed_decode is None:
        return "only Triton's kernels can be captured (engine.kernels auto or triton, without engine.deterministic)"
    return ""


def _stored_as(kv_dtype: str, layout: KVLayout) -> KVLayout:
    """Raises ConfigError."""
    if kv_dtype == "auto":
        return layout
    if layout.state == "mla":
        raise ConfigError(
            f"engine.kv_dtype is {kv_dtype}, but this model keeps latents, which no kernel reads in 8 bits: use auto"
        )
    return replace(layout, dtype="float8_e4m3fn" if kv_dtype == "float8" else kv_dtype, scales="vector")


def make_pool(place: RankPool, memory: memoryview, device: torch.device) -> DevicePool:
    """A rank's, where it lies in its instance's memory. Raises ConfigError."""
    buffer = memory[place.base_bytes : place.base_bytes + place.num_bytes]
    if device.type == "cpu":
        return KVPool(place.shard, place.num_blocks, buffer)
    return MirroredPool(place.shard, place.num_blocks, buffer, device)
