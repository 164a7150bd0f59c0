"""What ranks need beside their KV, against transformers' count of weights and against tensors that were alive at once."""

import gc
import json
import random
import types
from pathlib import Path
from typing import cast

import pytest
import torch
import transformers

from core.config.cluster_config import EngineConfig, ModelConfig
from core.plan import NewSeq, SeqWork, StepPlan
from core.types import SamplingParams
from engine.execution.pools.kv_pool import KVPool
from engine.execution.runner import Runner
from engine.sizing.memory_needs import needs_of
from engine.sizing.pool_size import size_pool
from engine.sizing.stored_weights import stored_as
from kernels.cpu.library import native
from kernels.cpu.prepacked import WeightFormat
from models.families.table import read_spec
from models.registry import LoadOptions, load_model
from parallel.mesh import ONE_RANK, Mesh
from tests.models.checkpoints import FAMILIES, HYBRID, make
from tests.models.real_configs import REAL, write_config
from tests.models.stored_by_libraries import WAYS as BY_LIBRARIES
from tests.models.stored_scaled import WAYS as SCALED
from tests.models.stored_scaled import meaning

ALL = {**FAMILIES, **HYBRID}
GPU, CPU, VOCAB = torch.device("cuda"), torch.device("cpu"), 2048


def weights_of(folder: Path, mesh: Mesh, *, num_spare: int = 0) -> list[int]:
    """Bytes of each rank on GPUs in bfloat16."""
    spec = read_spec(folder)
    stored = stored_as(spec, "bfloat16", "full", GPU, deterministic=False)
    found = needs_of(spec, EngineConfig(), mesh, stored, context_tokens=1024, num_spare=num_spare)
    return [needs.weight_bytes for needs in found]


@pytest.mark.parametrize("name", REAL)
def test_weights_are_as_many_as_transformers_counts(tmp_path: Path, name: str) -> None:
    config = transformers.AutoConfig.from_pretrained(write_config(tmp_path, name))
    with torch.device("meta"):
        counted = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    assert weights_of(tmp_path, ONE_RANK) == [pytest.approx(2 * counted, rel=0.003)]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", Mesh(tp=4)),
        ("meta-llama/Llama-3.3-70B-Instruct", Mesh(tp=2, pp=4)),
        ("Qwen/Qwen3-8B", Mesh(pp=3)),
        ("mistralai/Mixtral-8x7B-v0.1", Mesh(tp=2, ep=2)),
    ],
)
def test_ranks_hold_no_more_together_than_the_model_but_for_what_is_repeated(
    tmp_path: Path, name: str, mesh: Mesh
) -> None:
    write_config(tmp_path, name)
    (whole,) = weights_of(tmp_path, ONE_RANK)
    parts = weights_of(tmp_path, mesh)
    repeated = 1.0 if mesh.ep == 1 else 1.1  # attention, on ranks that share experts
    assert whole <= sum(parts) <= whole * repeated * 1.01
    assert max(parts) < whole / mesh.size * 1.25


def test_experts_copies_take_room(tmp_path: Path) -> None:
    write_config(tmp_path, "Qwen/Qwen3-235B-A22B")
    plain, spare = (weights_of(tmp_path, Mesh(ep=16), num_spare=n)[0] for n in (0, 16))
    assert spare - plain == 94 * 3 * 4096 * 1536 * 2


PARTS = [(family, what) for family in ALL for what in ("a long prompt", "many tokens sampled")]
PARTS += [(family, "many draft tokens") for family in HYBRID]


@pytest.mark.turns(3)
@pytest.mark.parametrize(("family", "what"), PARTS)
def test_the_largest_step_stays_within_what_is_set_aside_for_it(
    tmp_path: Path, family: str, what: str
) -> None:
    """Either half of the model by itself: a prompt's step samples nothing, and one token of each of many sequences is little.
    What recurrent layers keep of draft tokens is beside both."""
    sampled = what != "a long prompt"
    config = ALL[family](random.Random(family), 0)
    config.vocab_size, config.max_position_embeddings = VOCAB, 1024
    config.vocab_size_per_layer_input = VOCAB
    make(tmp_path / "model", config, seed=1)
    states = read_spec(tmp_path / "model").kv_layout(16, "float32").state_blocks
    num_blocks = 1024 + 256 * states
    engine = EngineConfig(max_batch_tokens=512, max_num_seqs=256 if sampled else 1, num_blocks=num_blocks)
    size = size_pool(tmp_path / "model", ModelConfig(), engine, device=CPU)
    pool = KVPool(size.shard, size.num_blocks, memoryview(bytearray(size.num_bytes)))
    model = load_model(tmp_path / "model", "float32", CPU)
    runner = Runner(model, pool, engine.block_size, num_state_blocks=states)
    plans = _many_sampled(states, num_drafts=what == "many draft tokens") if sampled else _long_prompt(states)
    measured = _peak_bytes(runner, plans, tmp_path)
    allowed = size.needs[0].step_bytes
    assert measured <= allowed, f"{measured:,} bytes were alive, {allowed:,} were set aside"
    if (
        what != "many draft tokens"
    ):  # the same sequences without draft tokens are more, so that these need not come near
        assert allowed <= 2.5 * measured, f"{allowed:,} bytes are set aside for {measured:,}"


def _long_prompt(states: int) -> list[StepPlan]:
    """The last 512 tokens of a prompt as long as can be; the tokens before them are told of, not computed. `states`: blocks with a
    sequence's recurrent state."""
    tokens = tuple(token % VOCAB for token in range(1024))
    new = NewSeq("long", tokens, 1024, SamplingParams(max_tokens=1))
    blocks = tuple(range(states + 64))
    work = SeqWork(key="long", start=512, count=512, block_ids=blocks, samples=False)
    return [StepPlan(step=1, new=(new,), copies=(), work=(work,), drop=())]


def _many_sampled(states: int, num_drafts: int = 0) -> list[StepPlan]:
    """Sequences of which 256 tokens are sampled at once, after a step that has warmed up what is kept between steps."""
    num_seqs = 256 // (1 + num_drafts)
    sampling = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, top_k=50, seed=1, num_logprobs=0)
    new = tuple(NewSeq(f"s{i}", (i % VOCAB, 1), 2, sampling) for i in range(num_seqs))
    blocks = [tuple(range(i * (states + 1), (i + 1) * (states + 1))) for i in range(num_seqs)]
    first, sampled = (
        tuple(
            SeqWork(
                key=seq.key,
                start=start,
                count=1 + len(drafts),
                block_ids=own,
                samples=start > 0,
                drafts=drafts,
            )
            for seq, own in zip(new, blocks, strict=True)
        )
        for start, drafts in ((0, ()), (1, (5,) * num_drafts))
    )
    return [
        StepPlan(step=1, new=new, copies=(), work=first, drop=()),
        StepPlan(step=2, new=(), copies=(), work=sampled, drop=()),
    ]


def _peak_bytes(runner: Runner, plans: list[StepPlan], folder: Path) -> int:
    """What the last plan's tensors took at once, by PyTorch's own count of its allocations."""
    for plan in plans[:-1]:
        runner.step(plan)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        runner.step(plans[-1])
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    sizes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    live = peak = 0
    for _, size in sizes:
        live += size
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.float32, "full"), (torch.bfloat16, "half"), (torch.bfloat16, "int8")]
)
def test_a_cpu_keeps_as_many_bytes_of_weights_as_are_counted(
    tmp_path: Path, dtype: torch.dtype, weights: WeightFormat
) -> None:
    if weights != "full" and native() is None:
        pytest.skip("there are no native kernels here")
    config = FAMILIES["llama"](random.Random(0), 0)
    config.vocab_size, config.hidden_size, config.tie_word_embeddings = 8192, 128, True
    folder = tmp_path / "model"
    make(tmp_path / "wide", config, seed=1).to(dtype).save_pretrained(folder)
    model = load_model(folder, "float32", CPU, options=LoadOptions(weights=weights))
    held = _held_bytes(model)
    stored = stored_as(model.spec, "float32", weights, CPU, deterministic=False)
    (needs,) = needs_of(model.spec, EngineConfig(), ONE_RANK, stored, context_tokens=1024)
    assert needs.weight_bytes == pytest.approx(held, rel=0.05)


@pytest.mark.skipif(native() is None, reason="there are no native kernels here")
@pytest.mark.parametrize(
    "way", ["NVFP4 of ModelOpt", "MXFP4 of Quark", "MXFP8 of ModelOpt", "FP8 of FBGEMM", "NF4"]
)
def test_a_cpu_keeps_as_many_bytes_of_quantised_weights_as_are_counted(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "model"
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    meaning(folder, *{**SCALED, **BY_LIBRARIES}[way], **sizes)
    model = load_model(folder, "float32", CPU, options=LoadOptions(weights="half"))
    held = _held_bytes(model)
    stored = stored_as(model.spec, "float32", "half", CPU, deterministic=False)
    (needs,) = needs_of(model.spec, EngineConfig(), ONE_RANK, stored, context_tokens=1024)
    assert needs.weight_bytes == pytest.approx(held, rel=0.05)


def _held_bytes(model: object) -> int:
    """Return the bytes of all tensors that `model` refers to. Of types and modules nothing is followed, and of functions only what
    they have enclosed: they lead to everything."""
    left: list[object] = [model]
    seen, storages = {id(model)}, dict[int, int]()
    while left:
        found = left.pop()
        if issubclass(type(found), torch.Tensor):
            own = cast(torch.Tensor, found).untyped_storage()
            storages[own.data_ptr()] = own.nbytes()
        function = isinstance(found, types.FunctionType)
        for other in found.__closure__ or () if function else gc.get_referents(found):
            if id(other) not in seen and not isinstance(other, type | types.ModuleType):
                seen.add(id(other))
                left.append(other)
    return sum(size for place, size in storages.items() if place)
