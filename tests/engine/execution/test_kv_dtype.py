"""KV of 8 bits in real steps: near to what floats say, whatever the pool, and handed over from and to other storage."""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from baton import LLM, SamplingParams
from core.config.cluster_config import EngineConfig, ModelConfig
from core.kv import KVShard
from core.messages import Commit
from core.plan import KVPush, NewSeq, SeqWork, StepPlan
from core.types import Request, TokenOut
from engine.execution.pools.kv_pool import KVPool
from engine.execution.runner import Runner
from engine.sizing.pool_size import size_pool
from kvtransfer.inbox import Inbox
from kvtransfer.pusher import Pusher
from kvtransfer.staging import STAGING_BYTES, HostStaging
from kvtransfer.transport.loopback_transport import LoopbackFabric, LoopbackReceiver, LoopbackSender
from models.causal_model import CausalModel
from models.registry import load_model
from tests.engine.execution.test_runner import Instance, prompts
from tests.kvtransfer.test_pusher import FakeMail
from tests.models.checkpoints import CPU, FAMILIES, make
from tests.models.real_configs import write_config
from tests.patience import PATIENCE_S

KINDS = {"float32": 1e-4, "float8_e4m3fn": 0.5, "int8": 0.12}
"""How far a log-probability may be from the one over floats, in nats: a tiny random model's logits spread over some ten."""
TEXT = tuple(range(2, 21))
BLOCKS = 12


@pytest.fixture(scope="module", params=[("llama", 0), ("glm_moe_dsa", 1)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    """With keys and values, and with latents and index keys behind them."""
    folder = tmp_path_factory.mktemp("model")
    family, number = request.param
    make(folder, FAMILIES[family](random.Random(3), number), seed=1)
    return load_model(folder, "float32", CPU)


@pytest.mark.turns(3)
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_the_same_tokens_whatever_the_pool_and_the_chunks(kv_dtype: str, model: CausalModel) -> None:
    """What is stored of a token depends on the token alone."""
    sampling = SamplingParams(temperature=0.0, max_tokens=10, min_tokens=10, masked_until_min=(1,))
    texts = prompts(random.Random(3))
    requests = [
        Request(id=str(i), prompt=text, sampling=sampling, reply_to="f") for i, text in enumerate(texts)
    ]
    want = Instance(model, kv_dtype=kv_dtype).run(requests)
    copies = 0
    for num_blocks in (200, 17):
        for where in ("simulated", ""):
            instance = Instance(
                model,
                num_blocks,
                simulated=where == "simulated",
                kv_dtype=kv_dtype,
                max_batch_tokens=5,
            )
            assert instance.run(requests) == want
            assert instance.run(requests) == want
            copies += instance.num_copies
    assert copies > 0


def shard_of(model: CausalModel, kv_dtype: str, block_size: int) -> KVShard:
    layout = model.spec.kv_layout(block_size, "float32")
    scales = "none" if kv_dtype == "float32" else "vector"
    return KVShard.whole(replace(layout, dtype=kv_dtype, scales=scales))


def rows_of(model: CausalModel, runner: Runner, start: int, blocks: tuple[int, ...], push: KVPush | None = None) -> torch.Tensor:  # fmt: skip
    """(vocab,) log-probabilities of what follows TEXT, of which tokens from `start` on are computed."""
    asked = SamplingParams(temperature=0.0, num_logprobs=model.spec.vocab_size, max_tokens=2)
    new = NewSeq("a", TEXT, len(TEXT), asked)
    work = SeqWork(key="a", start=start, count=len(TEXT) - start, block_ids=blocks, samples=True, push=push)
    (sampled,) = runner.step(StepPlan(step=0, new=(new,), copies=(), work=(work,), drop=())).sampled
    found = torch.empty(model.spec.vocab_size)
    for token, value in sampled.top:
        found[token] = value
    return found


@pytest.mark.turns(3)
@pytest.mark.parametrize("theirs", KINDS)
@pytest.mark.parametrize("ours", KINDS)
async def test_decode_goes_on_from_what_prefill_has_stored_otherwise(ours: str, theirs: str, model: CausalModel) -> None:  # fmt: skip
    """All but the last token are computed by one instance, in blocks of 4, the last by another, in blocks of 8."""
    source_shard, target_shard = shard_of(model, ours, 4), shard_of(model, theirs, 8)
    source = memoryview(bytearray(source_shard.pool_bytes(BLOCKS) + (STAGING_BYTES >> 6)))
    target = memoryview(bytearray(target_shard.pool_bytes(BLOCKS)))
    fabric, arrived = LoopbackFabric(), asyncio.Event()
    inbox = Inbox(
        target_shard, BLOCKS, "decode", "d1", on_complete=lambda _: arrived.set(), on_corrupted=lambda _: None
    )
    receiver = LoopbackReceiver(fabric, "decode", target, inbox.may_write, inbox.arrived)
    inbox.attach([receiver])
    grant = inbox.open("a", 0, "prefill", [7, 1, 5], first_token=0, num_tokens=len(TEXT) - 1, ttl_s=60)
    mail = FakeMail()
    staging = HostStaging(source, source_shard.pool_bytes(BLOCKS))
    pusher = Pusher(source_shard, BLOCKS, mail, [LoopbackSender(fabric, source)], staging=staging)
    pusher.open(grant, lambda _: None, lambda _: None, lambda _, why: pytest.fail(why))
    runner = Runner(model, KVPool(source_shard, BLOCKS, source), 4, pusher)
    rows_of(model, runner, 0, (3, 8, 2, 0, 6), KVPush(grant.id, 0, len(TEXT) - 1))
    pusher.finish(grant.id, [TokenOut(request_id="a", attempt=0, index=0, token=5)])
    inbox.committed(next(message for message in mail.sent if isinstance(message, Commit)))
    async with asyncio.timeout(PATIENCE_S):
        await arrived.wait()
    got = rows_of(model, Runner(model, KVPool(target_shard, BLOCKS, target), 8), len(TEXT) - 1, (7, 1, 5))
    floats = shard_of(model, "float32", 4)
    pool = KVPool(floats, BLOCKS, memoryview(bytearray(floats.pool_bytes(BLOCKS))))
    want = rows_of(model, Runner(model, pool, 4), 0, (1, 2, 3, 4, 5))
    assert want.std() > 1
    assert (got - want).abs().max() < KINDS[ours] + KINDS[theirs]
    assert torch.cosine_similarity(got, want, 0) > 0.995


def test_a_pool_of_8_bits_holds_more(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["llama"](random.Random(0), 0), seed=0)
    sizes = [
        size_pool(tmp_path, ModelConfig(dtype="bfloat16"), EngineConfig(kv_dtype=kind, kv_bytes=1 << 20))
        for kind in ("auto", "int8", "float8")
    ]
    plain, int8, float8 = (size.shard.layout for size in sizes)
    assert (plain.dtype, int8.dtype, float8.dtype) == ("bfloat16", "int8", "float8_e4m3fn")
    assert {size.dtype for size in sizes} == {"bfloat16"}
    assert int8.token_bytes == float8.token_bytes == plain.token_bytes * (plain.head_dim + 4) / (2 * plain.head_dim)  # fmt: skip
    assert sizes[1].num_blocks > 1.2 * sizes[0].num_blocks


@pytest.mark.parametrize("kv_dtype", ["int8", "float8"])
def test_latents_of_8_bits_are_laid_out_as_their_publisher_does(
    kv_dtype: Literal["int8", "float8"], tmp_path: Path
) -> None:
    """Four scales for 512 numbers, 64 numbers of bfloat16, and an index key of 128 numbers with one scale."""
    path = write_config(tmp_path, "deepseek-ai/DeepSeek-V3.2") / "config.json"
    small = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "vocab_size": 1000}
    path.write_text(json.dumps(json.loads(path.read_text()) | small))
    engine = EngineConfig(kv_dtype=kv_dtype, kv_bytes=1 << 30)
    layout = size_pool(tmp_path, ModelConfig(load_format="dummy"), engine).shard.layout
    assert layout.token_bytes == 2 * (512 + 4 * 4 + 2 * 64 + 128 + 4)


@pytest.mark.turns(3)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("kv_dtype", "decode_tp"), [("float8", 1), ("int8", 2)])
def test_a_served_model_says_nearly_the_same(kv_dtype: str, decode_tp: int) -> None:
    """Disaggregated: of the embedded model's text, what floats say first."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    texts = ["def fibonacci(n):\n", "import os\n\n\nclass Path"]
    with LLM("embedded") as llm:
        want = [answer.text for answer in llm.generate(texts, params)]
    with LLM("embedded", engine__kv_dtype=kv_dtype, decode__tp=decode_tp) as llm:
        assert [answer.text for answer in llm.generate(texts, params)] == want
