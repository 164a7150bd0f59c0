"""The batched sampler against transformers' processors, one row at a time, and against its own promises."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.plan import NewSeq, Sampled
from core.types import SamplingParams
from engine.execution.batch.batch import RankSeq
from engine.execution.sampling.sampler import uniform
from kernels.torch.reference import reference_ops
from kernels.torch.sampling import distribution
from tests.engine.execution.sampling_now import sample

VOCAB, OPS = 50, reference_ops()


def seq(sampling: SamplingParams, tokens: tuple[int, ...] = (1, 2, 3), num_prompt: int = 3) -> RankSeq:
    return RankSeq(NewSeq("k", tokens, num_prompt, sampling))


def tokens_of(logits: torch.Tensor, seqs: list[RankSeq]) -> list[int]:
    return [s.token for s in sample(logits.clone(), [str(i) for i in range(len(seqs))], seqs, OPS)]


def params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.3, 0.8, 1.0, 1.7)),
        top_k=rng.choice((0, 0, 1, 5, 60)),
        top_p=rng.choice((1.0, 0.9, 0.5, 0.05)),
        min_p=rng.choice((0.0, 0.0, 0.1, 0.5)),
        seed=rng.getrandbits(63),
    )


def reference(row: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """transformers' warpers in its own order: temperature, top-k, top-p, min-p."""
    scores = TemperatureLogitsWarper(p.temperature)(None, row[None])  # type: ignore[arg-type]
    if p.top_k:
        scores = TopKLogitsWarper(p.top_k)(None, scores)  # type: ignore[arg-type]
    if p.top_p < 1:
        scores = TopPLogitsWarper(p.top_p)(None, scores)  # type: ignore[arg-type]
    if p.min_p:
        scores = MinPLogitsWarper(p.min_p)(None, scores)  # type: ignore[arg-type]
    return torch.softmax(scores, -1)[0]


def test_the_distribution_is_that_of_transformers() -> None:
    rng = random.Random(1)
    sampling = [params(rng) for _ in range(200)]
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    ours = distribution(logits, sampling)
    ours = ours / ours.sum(-1, keepdim=True)
    for row, p, probs in zip(logits, sampling, ours, strict=True):
        torch.testing.assert_close(probs, reference(row, p), atol=1e-5, rtol=1e-4)


def test_samples_follow_the_distribution() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    p = SamplingParams(temperature=0.9, top_k=8)
    counts = np.zeros(VOCAB)
    for start in range(0, 8000, 500):
        seqs = [seq(SamplingParams(temperature=0.9, top_k=8, seed=s)) for s in range(start, start + 500)]
        np.add.at(counts, tokens_of(logits.expand(500, -1), seqs), 1)
    expected = reference(logits[0], p).numpy() * 8000
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    chi2 = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi2 < 30  # 7 degrees of freedom: p < 1e-4


def test_the_number_sampled_depends_on_seed_and_position_alone() -> None:
    rng = random.Random(3)
    sampling = [params(rng) for _ in range(24)]
    logits = torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(3))
    together = tokens_of(logits, [seq(p) for p in sampling])
    alone = [tokens_of(logits[i : i + 1], [seq(p)])[0] for i, p in enumerate(sampling)]
    backwards = tokens_of(logits.flip(0), [seq(p) for p in reversed(sampling)])
    assert together == alone == backwards[::-1]
    assert uniform(1, 2) != uniform(2, 1)
    assert len({uniform(s, i) for s in range(30) for i in range(30)}) == 900


def test_a_retry_that_begins_after_emitted_tokens_samples_what_would_have_come() -> None:
    p = SamplingParams(temperature=1.0, seed=9)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    undisturbed = seq(p)
    for token in (4, 5):
        undisturbed.append(token)
    resumed = seq(p, tokens=(1, 2, 3, 4, 5), num_prompt=3)
    assert tokens_of(logits, [undisturbed]) == tokens_of(logits, [resumed])


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    logits[0, 2] = 9.0
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[1, 2, 3, 2]]), logits.clone())
    p = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    got = logits.clone()
    sample(got, ["k"], [seq(p, (1, 2, 3, 2))], OPS)
    torch.testing.assert_close(got, want)


def test_presence_and_frequency_count_output_only() -> None:
    p = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.zeros(1, VOCAB)
    sample(logits, ["k"], [seq(p, tokens=(7, 8, 9, 9), num_prompt=2)], OPS)
    assert logits[0, 9] == -(0.5 + 2 * 0.25)
    assert logits[0, 7] == logits[0, 8] == 0


def test_bias_minimum_length_and_logprobs() -> None:
    p = SamplingParams(
        temperature=0.0, logit_bias=((4, 100.0),), min_tokens=2, masked_until_min=(4,), num_logprobs=3
    )
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6))
    raw = torch.log_softmax(logits, -1)[0]
    young, old = seq(p), seq(p, tokens=(1, 2, 3, 5, 6), num_prompt=3)
    (first,) = sample(logits.clone(), ["k"], [young], OPS)
    assert first.token != 4
    assert first.logprob == pytest.approx(float(raw[first.token]))
    assert [i for i, _ in first.top] == raw.topk(3).indices.tolist()
    assert tokens_of(logits, [old]) == [4]


def test_bad_words_are_those_of_transformers() -> None:
    words = ((7,), (3, 9), (2, 3, 4), (1, 2, 3, 5), (8, 8))
    tokens = (1, 2, 3)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(9))
    want = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=VOCAB - 1)(
        torch.tensor([tokens]), logits.clone()
    )
    got = logits.clone()
    sample(got, ["k"], [seq(SamplingParams(temperature=0.0, bad_words=words), tokens, 2)], OPS)
    assert torch.equal(got, want)
    assert want.isinf().sum() == 4


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_nothing_but_allowed_tokens_is_sampled(temperature: float) -> None:
    logits = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(9))
    p = SamplingParams(
        temperature=temperature, allowed_token_ids=(4, 11), logit_bias=((5, 100.0),), bad_words=((11,),)
    )
    every = [seq(replace(p, seed=n, bad_words=p.bad_words if n % 2 else ())) for n in range(64)]
    sampled = tokens_of(logits, every)
    assert set(sampled[0::2]) == {4, 11}
    assert set(sampled[1::2]) == {4}


def test_rows_get_as_many_logprobs_as_each_asks_for() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(8)) * 3
    want = torch.log_softmax(logits, -1)
    asked = (3, -1, 0, VOCAB + 5)
    seqs = [seq(SamplingParams(seed=n, num_logprobs=n, presence_penalty=0.5), num_prompt=1) for n in asked]
    for row, (got, count) in enumerate(zip(sample(logits, list("abcd"), seqs, OPS), asked, strict=True)):
        if count < 0:
            assert (got.logprob, got.top) == (None, ())
            continue
        assert got.logprob == pytest.approx(float(want[row, got.token]))
        top = want[row].topk(min(count, VOCAB))
        assert [i for i, _ in got.top] == top.indices.tolist()
        assert [value for _, value in got.top] == pytest.approx(top.values.tolist())


def test_mixed_batches_leave_greedy_rows_greedy() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(7))
    mixed: list[Any] = [
        seq(SamplingParams(temperature=0.0)),
        seq(SamplingParams(seed=1)),
        seq(SamplingParams(temperature=0.0)),
    ]
    tokens = tokens_of(logits, mixed)
    assert [tokens[0], tokens[2]] == logits[[0, 2]].argmax(-1).tolist()


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999])
def test_top_p_over_a_large_vocabulary_keeps_what_sorting_all_of_it_would(
    spread: float, top_p: float
) -> None:
    logits = (torch.randn(6, 5000, generator=torch.Generator().manual_seed(2)) * spread).round(decimals=2)
    sampling = [SamplingParams(top_p=top_p if row % 3 else 1.0) for row in range(6)]
    ours = distribution(logits, sampling)
    for row, own, probs in zip(logits, sampling, ours, strict=True):
        whole = torch.softmax(row, -1)
        order = sorted(range(5000), key=lambda token: (-float(whole[token]), token))
        kept, reached = set[int](), 0.0
        for token in order:
            if own.top_p < 1 and reached >= own.top_p + 1e-5:
                break
            kept.add(token)
            reached += float(whole[token])
        found = set(torch.nonzero(probs)[:, 0].tolist())
        # Sums of five thousand float32 numbers differ in their last bits: so may the tokens at the edge, which are as likely.
        edge = min((float(whole[token]) for token in kept), default=0.0)
        assert all(abs(float(whole[token]) - edge) < 1e-4 for token in found ^ kept)
        assert torch.equal(probs[sorted(found)], whole[sorted(found)])


ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "num_logprobs": 2},
    {"temperature": 0.0, "presence_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": ((7, 1.0),)},
    {"temperature": 0.8, "seed": 3},
]


@pytest.mark.parametrize("asked", ASKED, ids=[" ".join(asked) for asked in ASKED])
def test_logits_of_16_bits_are_made_floats_only_where_a_row_asks_for_more_than_its_likeliest_token(
    asked: dict[str, Any],
) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)).bfloat16()
    logits[0, [5, 9]] = 40.0
    greedy = seq(SamplingParams(temperature=0.0))
    seen: list[torch.dtype] = []

    def sampled(given: torch.Tensor, seqs: list[RankSeq]) -> list[Sampled]:
        def watched(values: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.append(values.dtype)
            return OPS.sample(values, *rest)

        return sample(given.clone(), ["a", "b", "c"], seqs, replace(OPS, sample=watched))

    plain, mixed = [greedy] * 3, [greedy, greedy, seq(SamplingParams(**asked))]
    assert sampled(logits, plain) == sampled(logits.float(), plain)
    assert sampled(logits, mixed) == sampled(logits.float(), mixed)
    assert sampled(logits, plain)[0].token == 5
    assert seen == [torch.bfloat16, *[torch.float32] * 3, torch.bfloat16]
