"""Packed weights that processes share: a model is the same one wherever they come from, and what is stored is its own alone."""

import errno
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.sizing.model_dims import dims_of, rules_of
from kernels.cpu import linear
from kernels.cpu.library import native
from kernels.cpu.prepacked import WeightFormat
from models.families.table import read_spec
from models.files import weights_folder
from models.files.hub import resolve
from models.files.weights_identity import weights_key
from models.formats import shared_weights
from models.lora.adapter import read_adapters
from models.registry import LoadOptions, load_model
from parallel.mesh import Mesh
from parallel.rules import Sharding
from tests.models.checkpoints import CPU, FAMILIES, HYBRID, Paged, make
from tests.models.formats.test_format_table import MAKE
from tests.models.gguf_files import write_gguf
from tests.models.peft_adapters import make_adapter
from tests.models.stored import packed_checkpoint, w8a8

pytestmark = pytest.mark.skipif(native() is None, reason="there are no native kernels here")
PROMPT = list(range(2, 30))
WEIGHTS: tuple[WeightFormat, ...] = ("full", "half", "int8", "int4", "fp8", "nvfp4")
QUANTISED: dict[str, Callable[[Path], object]] = {
    "awq": lambda folder: packed_checkpoint(folder, "awq", 16),
    "gptq of 8 bits": lambda folder: packed_checkpoint(folder, "gptq", 16, 8),
    "packed by rows": lambda folder: packed_checkpoint(folder, "packed", 0),
    "int8": lambda folder: w8a8(folder, "int", "channel"),
    "awq experts": lambda folder: packed_checkpoint(
        folder, "awq", 16, 4, "qwen3_moe", moe_intermediate_size=64
    ),
    **MAKE,
}


class Cache:
    """A folder for packed weights, and models that are loaded with it."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path

    def logits(
        self, setting: str | None = None, weights: WeightFormat = "half", **options: object
    ) -> torch.Tensor:
        chosen = LoadOptions(weights=weights, packed_cache=setting or str(self.path), **options)  # type: ignore[arg-type]
        model = load_model(self.folder, "float32", CPU, options=chosen)
        return torch.cat(Paged(model, 1, random.Random(0)).step([(0, 0, PROMPT)]))

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir()) if self.path.exists() else []


@pytest.fixture
def no_packing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and nothing can be packed any more."""

    def packed(*_: object) -> None:
        raise AssertionError("a matrix was packed")

    def forbid() -> None:
        for name in ("baton_pack_floats", "baton_pack_whole"):
            monkeypatch.setattr(linear.loaded(), name, packed)

    return forbid


def same_three_times(cache: Cache, no_packing: Callable[[], None], weights: WeightFormat = "half") -> None:
    alone = cache.logits("none", weights)
    assert cache.files == []
    assert torch.equal(cache.logits(weights=weights), alone), "those that are stored"
    assert [name.partition(".")[2] for name in cache.files] == ["weights"]
    no_packing()
    assert torch.equal(cache.logits(weights=weights), alone), "those that were stored"


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRID])
def test_every_family_computes_the_same_with_stored_weights(family: str, tmp_path: Path) -> None:
    make(tmp_path / "model", {**FAMILIES, **HYBRID}[family](random.Random(5), 1), seed=1)
    cache = Cache(tmp_path / "model", tmp_path / "cache")
    alone = cache.logits("none", "int8")
    for _ in range(2):
        assert torch.equal(cache.logits(weights="int8"), alone)
    assert len(cache.files) == 1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_second_start_packs_nothing(
    weights: WeightFormat, tied: bool, tmp_path: Path, no_packing: Callable[[], None]
) -> None:
    config = FAMILIES["llama"](random.Random(0), 0)
    config.tie_word_embeddings = tied
    make(tmp_path / "model", config, seed=0)
    same_three_times(Cache(tmp_path / "model", tmp_path / "cache"), no_packing, weights)


@pytest.mark.parametrize("kind", [each for each in QUANTISED if "experts" not in each])
def test_quantised_checkpoints_are_packed_once(
    kind: str, tmp_path: Path, no_packing: Callable[[], None]
) -> None:
    QUANTISED[kind](tmp_path / "model")
    same_three_times(Cache(tmp_path / "model", tmp_path / "cache"), no_packing)


def test_experts_stay_each_processs_own(tmp_path: Path) -> None:
    QUANTISED["awq experts"](tmp_path / "model")
    cache = Cache(tmp_path / "model", tmp_path / "cache")
    alone = cache.logits("none")
    for _ in range(2):
        assert torch.equal(cache.logits(), alone)
    model = load_model(
        cache.folder, "float32", CPU, options=LoadOptions(weights="half", packed_cache=str(cache.path))
    )
    with torch.inference_mode():
        for held in model.experts.values():
            for tensor in held.tensors:
                tensor.add_(0)  # they may move to another rank


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16", "Q4_K"])
def test_gguf_files_are_packed_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_packing: Callable[[], None]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    write_gguf(tmp_path / "model.gguf", "llama", kind)
    same_three_times(Cache(resolve(str(tmp_path / "model.gguf")), tmp_path / "cache"), no_packing)


def test_a_checkpoint_that_was_changed_is_packed_anew(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "model", tmp_path / "cache")
    found: list[torch.Tensor] = []
    for seed in (0, 2):
        make(cache.folder, FAMILIES["llama"](random.Random(0), 0), seed=seed)
        found.append(cache.logits())
        assert torch.equal(found[-1], cache.logits("none"))
    assert not torch.equal(*found)
    assert len(cache.files) == 2


def test_one_number_changed_in_the_middle_of_a_file_is_noticed(tmp_path: Path) -> None:
    """The samples of a checkpoint's revision do not reach everywhere."""
    config = FAMILIES["llama"](random.Random(0), 0)
    config.vocab_size = 20_000
    make(tmp_path / "model", config, seed=0)
    cache = Cache(tmp_path / "model", tmp_path / "cache")
    cache.logits()
    path = tmp_path / "model" / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 4)
        file.write(b"\x3f\x80\x00\x00")
    cache.logits()
    assert len(cache.files) == 2


def test_precisions_have_files_of_their_own(tmp_path: Path) -> None:
    make(tmp_path / "model", FAMILIES["qwen3"](random.Random(0), 0), seed=0)
    cache = Cache(tmp_path / "model", tmp_path / "cache")
    for weights in WEIGHTS:
        assert torch.equal(cache.logits(weights=weights), cache.logits("none", weights))
    assert torch.equal(cache.logits(deterministic=True), cache.logits("none", deterministic=True))
    assert len(cache.files) == len(WEIGHTS) + 1


def test_ranks_have_the_weights_of_their_own_part(tmp_path: Path) -> None:
    make(tmp_path / "model", FAMILIES["qwen3"](random.Random(0), 0), seed=0)
    spec, folder = read_spec(tmp_path / "model"), tmp_path / "cache"
    read: list[int] = []
    for _ in range(2):
        for rank in range(2):
            shard = Sharding(dims_of(spec), Mesh(tp=2), rank, rules_of(spec))
            options = LoadOptions(weights="half", packed_cache=str(folder))
            model = load_model(tmp_path / "model", "float32", CPU, shard, options=options)
            read.append(model.bytes_read)
    assert len(list(folder.glob("*.weights"))) == 2
    assert max(read[2:]) < min(read[:2]) / 4, "norms alone"


def test_adapters_work_beside_stored_weights(tmp_path: Path) -> None:
    reference = make(tmp_path / "model", FAMILIES["qwen3"](random.Random(0), 0), seed=0)
    adapted = make_adapter(tmp_path / "adapter", reference, 1)
    with torch.inference_mode():
        wanted = adapted(torch.tensor([PROMPT])).logits[0]
    paths = {"own": str(tmp_path / "adapter")}
    (adapter,) = read_adapters(paths, read_spec(tmp_path / "model"))
    for _ in range(2):
        options = LoadOptions(weights="half", packed_cache=str(tmp_path / "cache"), adapters=paths)
        model = load_model(tmp_path / "model", "float32", CPU, options=options)
        (found,) = Paged(model, 1, random.Random(0)).step([(0, 0, PROMPT)], adapters={0: adapter.key})
        assert torch.allclose(found, wanted, atol=1e-3, rtol=1e-3)


def test_of_two_that_start_at_once_one_packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "model", FAMILIES["llama"](random.Random(0), 0), seed=0)
    cache, library, calls = Cache(tmp_path / "model", tmp_path / "cache"), linear.loaded(), list[int]()
    pack = library.baton_pack_floats

    def counted(*arguments: object) -> None:
        calls.append(1)
        pack(*arguments)

    monkeypatch.setattr(library, "baton_pack_floats", counted)
    alone = cache.logits("none")
    num_alone = len(calls)
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(lambda _: cache.logits(), range(2))]
    assert all(torch.equal(each, alone) for each in found)
    assert len(calls) == 2 * num_alone
    assert len(cache.files) == 1


def test_a_damaged_file_costs_a_line_and_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path / "model", FAMILIES["llama"](random.Random(0), 0), seed=0)
    cache = Cache(tmp_path / "model", tmp_path / "cache")
    wanted = cache.logits()
    (name,) = cache.files
    with (cache.path / name).open("r+b") as file:
        file.seek(2 << 20)
        file.write(bytes(64))
    assert torch.equal(cache.logits(), wanted)
    assert caplog.text.count("its content is not what was written") == 1
    assert torch.equal(cache.logits(), wanted)
    assert cache.files == [name]


def test_a_full_disk_leaves_weights_in_private_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    make(tmp_path / "model", FAMILIES["llama"](random.Random(0), 0), seed=0)
    cache = Cache(tmp_path / "model", tmp_path / "cache")
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert torch.equal(cache.logits(), cache.logits("none"))
    lines = [record.message for record in caplog.records if "packed weights" in record.message]
    assert len(lines) == 1
    assert "are not shared" in lines[0]
    assert "No space left" in lines[0]
    assert cache.files == []


def test_a_folder_that_cannot_be_made_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path / "model", FAMILIES["llama"](random.Random(0), 0), seed=0)
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "model", tmp_path / "file" / "cache")
    assert torch.equal(cache.logits(), cache.logits("none"))
    assert len([record for record in caplog.records if "are not shared" in record.message]) == 1


def test_small_checkpoints_are_not_stored_unless_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_weights, "default_folder", lambda: tmp_path / "cache")
    make(tmp_path / "model", FAMILIES["llama"](random.Random(0), 0), seed=0)
    cache = Cache(tmp_path / "model", tmp_path / "cache")
    cache.logits("auto")
    assert cache.files == []
    monkeypatch.setattr(shared_weights, "LEAST_BYTES", 1)
    cache.logits("auto")
    assert len(cache.files) == 1


def test_pods_and_folders_in_memory_have_no_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/shm/cache")
    assert weights_folder.default_folder() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert weights_folder.default_folder() is None


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
def test_what_says_how_weights_are_stored_is_part_of_their_name(name: str, tmp_path: Path) -> None:
    make(tmp_path / "model", FAMILIES["llama"](random.Random(5), 1), seed=1)
    before = weights_key(tmp_path / "model")
    (tmp_path / "model" / name).write_text('{"quantization": {}}')
    assert weights_key(tmp_path / "model") != before
