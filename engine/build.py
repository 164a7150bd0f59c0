"""From a model's folder and a configuration to the ranks of an instance: loads weights, sizes the pool, binds the runner."""

from dataclasses import dataclass
from pathlib import Path

import torch

from core.config import EngineConfig, ModelConfig
from core.errors import ConfigError
from core.kv import KVShard
from core.ports import LayerSink
from engine.devices import choose_device
from engine.group import InlineGroup
from engine.kvpool import KVPool, Pool
from engine.mirror import MirroredPool
from engine.runner import Runner
from models.families import read_spec
from models.registry import choose_dtype, load_model


@dataclass(frozen=True, slots=True)
class PoolSize:
    shard: KVShard
    num_blocks: int
    max_context_tokens: int

    @property
    def num_bytes(self) -> int:
        return self.shard.pool_bytes(self.num_blocks)


def size_pool(folder: Path, model: ModelConfig, engine: EngineConfig) -> PoolSize:
    """How many blocks an instance has, from the model's description alone. Raises ConfigError."""
    spec = read_spec(folder)
    dtype = choose_dtype(spec, model.dtype, choose_device(engine.device))
    shard = KVShard.whole(spec.kv_layout(engine.block_size, dtype))
    num_blocks = engine.num_blocks or engine.kv_bytes // shard.pool_bytes(1)
    if num_blocks < 2:
        raise ConfigError(
            f"engine.kv_bytes of {engine.kv_bytes} holds {num_blocks} blocks of {shard.pool_bytes(1)} bytes"
        )
    return PoolSize(shard, num_blocks, model.max_context_tokens or spec.max_context_tokens)


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
    loaded = load_model(folder, size.shard.layout.dtype, device, kernels=engine.kernels)
    pool: Pool
    if device.type == "cpu":
        pool = KVPool(size.shard, size.num_blocks, buffer)
    else:
        pool = MirroredPool(size.shard, size.num_blocks, buffer, device)
    return InlineGroup(Runner(loaded, pool, engine.block_size, sink).step)
