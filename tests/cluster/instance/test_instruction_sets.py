"""Whole instances on each instruction set, with rows and KV in bfloat16 where it has products of that."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from core.config.cluster_config import ClusterConfig
from core.types import TokenOut
from engine.sizing.pool_size import size_pool
from kernels.cpu.library import Isa
from tests.cluster.instance.instance_world import World, world
from tests.instruction_sets import up_to

VOCAB, COUNT = 80, 24
NATS = {Isa.AVX2: 1e-4, Isa.AVX512: 1e-4, Isa.AVX512_BF16: 0.15, Isa.AMX: 0.15, Isa.NEON: 1e-4}
"""How far a token's log-probability may be from transformers' in float32, of logits that spread over some ten. bfloat16 has 8 bits."""
Said = list[list[tuple[int, float]]]
"""Each prompt's tokens and their log-probabilities."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of bfloat16 with heads of 32, and the same numbers in float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=256, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp("model")
    model.bfloat16().save_pretrained(folder)
    return folder, transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(params=Isa, ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Iterator[Isa]:
    with up_to(request.param):
        yield request.param


@pytest.fixture
async def alone(isa: Isa, reference: tuple[Path, Any]) -> AsyncIterator[Said]:
    """What one instance says that has room for everything."""
    async with world(reference[0], 0, 1) as w:
        assert stored(w.config) == ("bfloat16" if isa.rounds_rows else "float32")
        yield await said(w)
        await w.idle()


def stored(config: ClusterConfig) -> str:
    return size_pool(Path(config.model.path), config.model, config.engine).shard.layout.dtype


def prompts() -> list[tuple[int, ...]]:
    """Some share a prefix that ends inside a block. One is longer than what a decode step's kernels take at once."""
    rng = random.Random(1)
    shared = tuple(rng.randrange(2, VOCAB) for _ in range(30))
    lengths = (5, 140, 17, 33, 60, 1, 90, 25)
    return [
        (shared[: rng.randrange(5, 30)] if i % 2 else ())
        + tuple(rng.randrange(2, VOCAB) for _ in range(length))
        for i, length in enumerate(lengths)
    ]


async def said(w: World) -> Said:
    async def one(prompt: tuple[int, ...]) -> list[TokenOut]:
        request = w.request(prompt, COUNT, min_tokens=COUNT, num_logprobs=0)
        return [token async for token in w.frontend.generate(request)]

    answers = await asyncio.gather(*map(one, prompts()))
    return [[(token.token, token.logprob or 0.0) for token in answer] for answer in answers]


@torch.inference_mode()
def farthest(model: Any, answers: Said) -> tuple[float, float]:
    """Return how far log-probabilities are from the model's at most, and how much likelier its own choice was."""
    off, lost = 0.0, 0.0
    for prompt, answer in zip(prompts(), answers, strict=True):
        tokens = [token for token, _ in answer]
        rows = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = rows[range(len(tokens)), tokens]
        off = max(off, (wanted - torch.tensor([value for _, value in answer])).abs().max().item())
        rows[:, 1] = -torch.inf
        lost = max(lost, (rows.max(-1).values - wanted).max().item())
    return off, lost


async def test_tokens_and_their_probabilities_are_those_of_transformers(
    isa: Isa, reference: tuple[Path, Any], alone: Said
) -> None:
    off, lost = farthest(reference[1], alone)
    assert off < NATS[isa]
    assert lost < NATS[isa]
    assert all(len(answer) == COUNT for answer in alone)


@pytest.mark.parametrize(
    ("pools", "keys"),
    [
        ((1, 1), {}),
        ((0, 1), {"engine.max_batch_tokens": 5}),
        ((0, 1), {"engine.prefix_cache": False, "engine.lookahead": False}),
        ((0, 1), {"engine.speculate": "ngram"}),
    ],
    ids=["handed over", "in small chunks", "without a cache", "proposed"],
)
async def test_no_bit_depends_on_where_or_beside_what_a_token_is_computed(
    reference: tuple[Path, Any], alone: Said, pools: Sequence[int], keys: dict[str, Any]
) -> None:
    async with world(reference[0], *pools, **keys) as w:
        assert await said(w) == alone
        await w.idle()


async def test_no_bit_depends_on_preemption_and_lower_tiers(reference: tuple[Path, Any], alone: Said) -> None:
    keys = {"engine.num_blocks": 64, "engine.host_cache_bytes": 1 << 22}
    async with world(reference[0], 0, 1, **keys) as w:
        for _ in range(3):
            assert await said(w) == alone
        await w.idle()
        report = await w.report(w.decodes[0])
        assert report.work.preempted > 0
        assert report.tiers.host_hits > 0


@pytest.mark.parametrize("isa", [Isa.AVX512_BF16], indirect=True, ids=lambda isa: isa.name)
@pytest.mark.parametrize("rounding", ["prefill", "decode"])
async def test_kv_is_handed_over_between_pools_of_bfloat16_and_of_float32(
    isa: Isa, rounding: str, reference: tuple[Path, Any]
) -> None:
    """As between processors of different kinds."""
    other = "decode" if rounding == "prefill" else "prefill"
    async with world(reference[0], 1, 1, of_role={other: {"model.dtype": "float32"}}) as w:
        answers = await said(w)
        await w.idle()
        assert {stored(w.config), stored(w.config_of[other])} == {"bfloat16", "float32"}
    off, lost = farthest(reference[1], answers)
    assert 1e-4 < off < NATS[isa]
    assert lost < NATS[isa]
