"""Tokens sampled on a device against the engine's sampler, which is itself tested against transformers; log-probabilities."""

import numpy as np
import pytest
import torch

from core.types import SamplingParams
from engine.execution.sampling.sampler import uniform
from kernels.sampling import Masks, Penalties, SampleShapes
from kernels.torch import sampling as reference
from kernels.torch.sampling import distribution
from kernels.triton.sampling import likeliest, logprobs, mask, penalise, sample, sample_rows

V = 100


def engine_sample(logits: torch.Tensor, params: list[SamplingParams], uniforms: torch.Tensor) -> torch.Tensor:
    """By definition, row by row."""
    tokens = logits.argmax(-1)
    for row, sampling in enumerate(params):
        if sampling.temperature > 0:
            cumulative = distribution(logits[row : row + 1], [sampling])[0].double().cumsum(-1)
            target = uniforms[row] * cumulative[-1]
            tokens[row] = int(torch.searchsorted(cumulative, target, right=True))
    return tokens


def on_device(
    logits: torch.Tensor, params: list[SamplingParams], uniforms: torch.Tensor, device: torch.device
):
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

    floats = {name: column(name, torch.float32) for name in ("temperature", "top_p", "min_p")}
    return sample(
        logits.to(device), floats["temperature"], column("top_k", torch.int32), floats["top_p"], floats["min_p"],
        uniforms.to(device),
    ).cpu()  # fmt: skip


CUTS = [
    {},
    {"top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"top_p": 0.01},
]


@pytest.mark.parametrize("with_ties", [False, True])
def test_the_sample_of_the_engine(device: torch.device, with_ties: bool) -> None:
    params = [SamplingParams(temperature=1.3, **cut) for cut in CUTS]  # type: ignore[arg-type]
    params += [SamplingParams(temperature=0.0), SamplingParams(temperature=0.4, top_p=0.9)]
    logits = torch.randn(len(params), V) * 3
    if with_ties:
        logits = logits.round()
    for position in range(2):
        uniforms = torch.tensor([uniform(seed, position) for seed in range(len(params))], dtype=torch.float64)
        assert torch.equal(
            on_device(logits, params, uniforms, device), engine_sample(logits, params, uniforms)
        )


@pytest.mark.parametrize("spread", [0.1, 2.0, 9.0])
def test_the_sample_of_a_larger_vocabulary(device: torch.device, spread: float) -> None:
    """What may be sampled is little, or too much to be listed."""
    cuts = [{"top_k": 3}, {"top_k": 500}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.5}, {"min_p": 0.1}, {}]
    params = [SamplingParams(temperature=0.8, **cut) for cut in cuts]  # type: ignore[arg-type]
    logits = torch.randn(len(params), 1500) * spread
    for position in range(2):
        uniforms = torch.tensor([uniform(seed, position) for seed in range(len(params))], dtype=torch.float64)
        assert torch.equal(
            on_device(logits, params, uniforms, device), engine_sample(logits, params, uniforms)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_likeliest_of_logits_of_16_bits_is_the_first_of_equal_ones(
    device: torch.device, dtype: torch.dtype
) -> None:
    logits = (torch.randn(4, 1500) * 3).to(dtype)
    logits[1, [70, 1499]] = logits[2, [1499, 64]] = 100.0
    logits[3] = -torch.inf
    got = likeliest(logits.to(device)).cpu()
    assert got[1:].tolist() == [70, 64, 0]
    assert torch.equal(got, logits.float().argmax(-1))


def test_the_likeliest_tokens_are_different_ones_where_few_are_allowed(device: torch.device) -> None:
    """Five of six are asked for, of which two are allowed: each comes once, the allowed ones first."""
    logits = torch.tensor([[-torch.inf, 2.0, -torch.inf, -torch.inf, 3.0, -torch.inf]])
    _, values, ids = logprobs(logits.to(device), torch.tensor([4], device=device), 5)
    assert ids[0, :2].tolist() == [4, 1]
    assert len(set(ids[0].tolist())) == 5
    assert values[0, 2:].tolist() == [-torch.inf] * 3


def test_a_number_next_to_one_samples_the_last_token_that_may_be(device: torch.device) -> None:
    logits, params = torch.tensor([[0.0, 5.0, 4.9, -50.0]]), [SamplingParams(temperature=1.0, top_k=2)]
    assert on_device(logits, params, torch.tensor([1 - 2.0**-53], dtype=torch.float64), device).item() == 2


def test_samples_of_a_batch_are_those_of_a_cpu(device: torch.device) -> None:
    shapes = [SamplingParams(temperature=0.7, **cut) for cut in CUTS]  # type: ignore[arg-type]
    rows = [(s.temperature, s.top_k, s.top_p, s.min_p, uniform(5, row)) for row, s in enumerate(shapes)]
    columns = torch.tensor(rows, dtype=torch.float64).T.contiguous()
    logits = torch.randn(len(shapes), V) * 2
    got = sample_rows(logits.to(device), SampleShapes(shapes, columns.to(device)))
    assert torch.equal(got.cpu(), reference.sample(logits, SampleShapes(shapes, columns)))


def test_penalties(device: torch.device) -> None:
    logits = torch.randn(3, V)
    repetition, presence, frequency = (
        torch.tensor([1.0, 1.3, 1.1]),
        torch.tensor([0.5, 0.0, 0.2]),
        torch.rand(3),
    )
    entries = [(0, 3, 2), (0, 9, 0), (1, 3, 0), (2, 99, 5), (2, 0, 1), (-1, 3, 1)]
    want = logits.clone()
    for row, token, count in entries[:-1]:
        value = (
            want[row, token] / repetition[row] if want[row, token] > 0 else want[row, token] * repetition[row]
        )
        want[row, token] = value - (presence[row] + frequency[row] * count if count else 0)
    got = logits.clone().to(device)
    penalties = Penalties(
        torch.tensor(entries).T.contiguous(), torch.stack((repetition, presence, frequency))
    )
    penalise(got, Penalties(penalties.entries.to(device), penalties.factors.to(device)))
    reference.penalise(logits, penalties)
    torch.testing.assert_close(logits, want)
    torch.testing.assert_close(got.cpu(), want)


def test_masks(device: torch.device) -> None:
    logits, rows = torch.randn(4, V), torch.tensor([2, 0])
    allowed = torch.rand(2, V) < 0.5
    packed = np.packbits(allowed.numpy(), axis=1, bitorder="little")
    bits = np.zeros((2, -(-V // 32) * 4), np.uint8)
    bits[:, : packed.shape[1]] = packed
    words = torch.from_numpy(bits.view(np.int32))
    want = logits.clone()
    want[rows] = torch.where(allowed, want[rows], -torch.inf)
    got = logits.clone().to(device)
    mask(got, rows.to(device), words.to(device))
    reference.mask(logits, Masks(rows, words))
    assert torch.equal(logits, want)
    assert torch.equal(got.cpu(), want)


def test_logprobs(device: torch.device) -> None:
    logits, tokens = torch.randn(4, V) * 5, torch.tensor([3, 99, 0, 77])
    want = logits.log_softmax(-1)
    chosen, values, ids = logprobs(logits.to(device), tokens.to(device), 5)
    torch.testing.assert_close(chosen.cpu(), want.gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(values.cpu(), want.topk(5).values)
    assert torch.equal(ids.cpu(), want.topk(5).indices)
