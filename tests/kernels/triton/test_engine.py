"""A rank's steps on the Triton kernels, from a plan to what is said of the tokens."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.kv import KVShard
from core.plan import NewSeq, SeqWork, StepPlan
from core.types import SamplingParams
from device.cuda import CudaDevice
from device.poller import Poller
from device.port import PoolMemory
from device.simulated import SimulatedDevice
from engine.execution.pools.resident_pool import ResidentPool
from engine.execution.runner import Runner
from kernels.ops import Ops
from kernels.torch.reference import reference_ops
from kernels.triton.ops import invariant_triton_ops, triton_ops
from kernels.triton.platform import INTERPRETED
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint
from models.model import Model
from tests.kernels.triton.places import need_equal_places
from tests.models.checkpoints import FAMILIES, make

BLOCK_SIZE, NUM_BLOCKS = 4, 24


def runner_of(folder: Path, device: torch.device, ops: Ops, kv_dtype: str = "float32") -> Runner:
    spec = read_spec(folder)
    model = Model(spec, ops, Checkpoint(folder, torch.float32, device, keeps=ops.keeps), device)
    layout = spec.kv_layout(BLOCK_SIZE, "float32")
    scales = "none" if kv_dtype == "float32" else "vector"
    shard = KVShard.whole(replace(layout, dtype=kv_dtype, scales=scales))
    own = SimulatedDevice(seed=0) if INTERPRETED else CudaDevice(0)
    memory = PoolMemory(own, own.allocate(shard.pool_bytes(NUM_BLOCKS)), Poller())
    return Runner(model, ResidentPool(shard, NUM_BLOCKS, memory, device), BLOCK_SIZE)


def test_logprobs_are_those_of_transformers(device: torch.device, tmp_path: Path) -> None:
    config = FAMILIES["llama"](random.Random(0), 0)
    reference = make(tmp_path, config, seed=0)
    step = runner_of(tmp_path, device, triton_ops(device)).step
    texts = {"a": (5, 6, 7, 8, 9), "b": (3, 4), "c": (11, 12, 13)}
    asked = {"a": 4, "b": -1, "c": 0}
    sampling = {key: SamplingParams(temperature=0.7, seed=1, num_logprobs=n) for key, n in asked.items()}
    new = tuple(NewSeq(key, text, len(text), sampling[key]) for key, text in texts.items())
    known = {key: list(text) for key, text in texts.items()}
    for number in range(3):
        done = [0 if number == 0 else len(known[key]) - 1 for key in known]
        work = tuple(
            SeqWork(
                key=key,
                start=start,
                count=len(known[key]) - start,
                block_ids=tuple(range(8 * i, 8 * i + 8)),
                samples=True,
            )
            for i, (key, start) in enumerate(zip(known, done, strict=True))
        )
        for sampled in step(
            StepPlan(step=number, new=new if number == 0 else (), copies=(), work=work, drop=())
        ).sampled:
            with torch.inference_mode():
                row = reference(torch.tensor([known[sampled.key]])).logits[0, -1].log_softmax(-1)
            known[sampled.key].append(sampled.token)
            if asked[sampled.key] < 0:
                assert sampled.logprob is None
                continue
            assert sampled.logprob == pytest.approx(float(row[sampled.token]), abs=1e-3)
            top = row.topk(asked[sampled.key])
            assert [token for token, _ in sampled.top] == top.indices.tolist()
            assert [value for _, value in sampled.top] == pytest.approx(top.values.tolist(), abs=1e-3)


TEXT = (5, 9, 3, 22, 17, 8, 41, 30, 2, 11, 6, 33, 19)


def spoken(runner: Runner, vocab: int, cuts: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """By position (vocab,) log-probabilities of what follows TEXT's tokens, computed in pieces that end at `cuts`."""
    asked = SamplingParams(temperature=0.0, num_logprobs=vocab)
    found: dict[int, torch.Tensor] = {}
    start = 0
    for step, end in enumerate(cuts):
        new = NewSeq("a", TEXT, len(TEXT), asked)
        work = SeqWork(key="a", start=start, count=end - start, block_ids=(3, 0, 5, 2), samples=True)
        (sampled,) = runner.step(
            StepPlan(step=step, new=(new,), copies=(), work=(work,), drop=("a",))
        ).sampled
        found[end] = torch.empty(vocab)
        for token, value in sampled.top:
            found[end][token] = value
        start = end
    return found


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_kv_of_8_bits(device: torch.device, kv_dtype: str, family: str, tmp_path: Path) -> None:
    """Prompt, chunk and decode: what PyTorch's operations say over the same storage, near to what floats say."""
    make(tmp_path, config := FAMILIES[family](random.Random(3), 1), seed=0)
    cuts, vocab = (7, 12, 13), config.vocab_size
    got = spoken(runner_of(tmp_path, device, triton_ops(device), kv_dtype), vocab, cuts)
    same = spoken(runner_of(tmp_path, device, reference_ops(), kv_dtype), vocab, cuts)
    floats = spoken(runner_of(tmp_path, device, reference_ops()), vocab, cuts)
    for end in cuts:
        assert cosine(got[end], same[end]) > 0.9995
        assert cosine(got[end], floats[end]) > (0.999 if kv_dtype == "int8" else 0.98)
        assert not torch.equal(got[end], floats[end])


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_batch_invariant_over_8_bits(device: torch.device, kv_dtype: str, tmp_path: Path) -> None:
    make(tmp_path, config := FAMILIES["llama"](random.Random(3), 1), seed=0)
    whole, pieces = (
        spoken(runner_of(tmp_path, device, invariant_triton_ops(device), kv_dtype), config.vocab_size, cuts)
        for cuts in ((13,), (4, 12, 13))
    )
    torch.testing.assert_close(whole[13], pieces[13])
    need_equal_places()
    assert torch.equal(whole[13], pieces[13])


def cosine(got: torch.Tensor, want: torch.Tensor) -> float:
    return torch.cosine_similarity(got.double(), want.double(), 0).item()
