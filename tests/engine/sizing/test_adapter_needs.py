"""What adapters take is counted before the pool is sized: as many bytes as their matrices have on each rank."""

import random
from pathlib import Path

import pytest

from core.config.adapter_config import AdapterConfig
from core.config.cluster_config import EngineConfig, ModelConfig
from core.cost.memory_model import DeviceMemory
from core.errors import ConfigError
from engine.sizing.pool_size import PoolSize, RankMemory, size_pool
from parallel.mesh import Mesh
from tests.models.checkpoints import CPU, FAMILIES, make
from tests.models.peft_adapters import LINEAR, make_adapter

NAMES = ("one", "two")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("needs")
    config = FAMILIES["llama"](random.Random(0), 0)
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    config.hidden_size, config.num_hidden_layers, config.intermediate_size = 32, 4, 48
    config.head_dim = 8
    reference = make(folder, config, seed=0)
    for seed, name in enumerate(NAMES):
        make_adapter(folder / name, reference, seed, rank=3 + seed, targets=LINEAR)
    return folder


NO_SLOTS = AdapterConfig()


def sized(folder: Path, mesh: Mesh, *names: str, slots: AdapterConfig = NO_SLOTS) -> PoolSize:
    model = ModelConfig(adapters={name: str(folder / name) for name in names})
    return size_pool(folder, model, EngineConfig(num_blocks=100), mesh, device=CPU, slots=slots)


def more_bytes(folder: Path, mesh: Mesh, *names: str, slots: AdapterConfig = NO_SLOTS) -> list[int]:
    plain = sized(folder, mesh).needs
    adapted = sized(folder, mesh, *names, slots=slots).needs
    assert all(a.step_bytes > b.step_bytes for a, b in zip(adapted, plain, strict=True))
    return [a.weight_bytes - b.weight_bytes for a, b in zip(adapted, plain, strict=True)]


def numbers(hidden: int, kv: int, inner: int, tp: int) -> int:
    """Count a layer's A and B of rank 1 on one of `tp` ranks: what is cut, and what each has whole."""
    cut = (hidden + 2 * kv + hidden) + (2 * inner + inner)
    whole = 3 * hidden + hidden + 2 * hidden + hidden
    return cut // tp + whole


@pytest.mark.parametrize(
    ("mesh", "layers"), [(Mesh(), 4), (Mesh(tp=2), 4), (Mesh(pp=2), 2), (Mesh(tp=2, pp=2), 2)]
)
def test_each_rank_counts_its_part(mesh: Mesh, layers: int, folder: Path) -> None:
    each = 4 * layers * numbers(32, 16, 48, mesh.tp)
    assert more_bytes(folder, mesh, "one") == [3 * each] * mesh.size
    assert more_bytes(folder, mesh, *NAMES) == [(3 + 4) * each] * mesh.size


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(pp=2)])
def test_slots_count_as_adapters_of_the_largest_rank_whether_any_is_loaded_or_not(
    mesh: Mesh, folder: Path
) -> None:
    """`two` has matrices beside every module, and the rank 4."""
    slots = AdapterConfig(folders=("/adapters",), slots=3, max_rank=4)
    assert more_bytes(folder, mesh, slots=slots) == [3 * each for each in more_bytes(folder, mesh, "two")]
    both = zip(more_bytes(folder, mesh, "one"), more_bytes(folder, mesh, slots=slots), strict=True)
    assert more_bytes(folder, mesh, "one", slots=slots) == [a + b for a, b in both]
    without = AdapterConfig(slots=3, max_rank=4)
    assert sized(folder, mesh, slots=without).needs == sized(folder, mesh).needs, "nothing may be loaded"


def test_slots_beside_a_model_that_takes_no_adapters_are_refused(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["deepseek_v2"](random.Random(1), 0), seed=0)
    with pytest.raises(ConfigError, match="adapters are not supported"):
        sized(tmp_path, Mesh(), slots=AdapterConfig(folders=("/adapters",)))


def test_a_pool_that_is_as_large_as_there_is_room_shrinks_by_them(folder: Path) -> None:
    found = RankMemory(
        devices=(DeviceMemory(name="a host", total_bytes=8 << 20, free_bytes=8 << 20, is_host=True),)
    )
    engine = EngineConfig(max_batch_tokens=16, max_num_seqs=4096, num_threads=1)
    blocks = []
    for names in ((), NAMES):
        model = ModelConfig(adapters={name: str(folder / name) for name in names})
        blocks.append(size_pool(folder, model, engine, device=CPU, found=found).num_blocks)
    assert blocks[1] < blocks[0]
