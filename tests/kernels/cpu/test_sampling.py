"""Native samples, of masked rows too, against PyTorch's, on every instruction set of this processor."""

from collections.abc import Sequence

import pytest
import torch

from core.types import SamplingParams
from kernels.cpu import library, sampling
from kernels.sampling import Masks, SampleShapes
from kernels.torch import sampling as reference

pytestmark = pytest.mark.skipif(not library.instruction_sets(), reason="there are no native kernels here")
CUTS: list[dict[str, float]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
]
VOCABS = (1, 7, 33, 1000, 1024, 4101)


@pytest.fixture(params=list(library.Isa), ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> library.Isa:
    if request.param not in library.instruction_sets():
        pytest.skip(f"this processor has no {request.param.name}")
    return request.param


def shapes_of(params: Sequence[SamplingParams], uniforms: Sequence[float]) -> SampleShapes:
    rows = [
        (p.temperature, p.top_k, p.top_p, p.min_p, number) for p, number in zip(params, uniforms, strict=True)
    ]
    return SampleShapes(params, torch.tensor(rows, dtype=torch.float64).T.contiguous())


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("with_ties", [False, True])
def test_the_samples_of_pytorch(isa: library.Isa, vocab: int, with_ties: bool) -> None:
    torch.manual_seed(vocab)
    params = [SamplingParams(**{"temperature": 1.0, **cut}) for cut in CUTS for _ in range(20)]  # type: ignore[arg-type]
    logits = torch.randn(len(params), vocab) * 3
    if with_ties:
        logits = logits.round()
    logits[:, 1::5] = -torch.inf  # as masks leave them
    asked = shapes_of(params, torch.rand(len(params), dtype=torch.float64).tolist())
    assert torch.equal(
        sampling.sample(logits.clone(), asked, isa=isa), reference.sample(logits.clone(), asked)
    )


def test_a_sample_is_that_of_the_row_alone_and_of_any_number_of_threads(isa: library.Isa) -> None:
    torch.manual_seed(0)
    params = [SamplingParams(temperature=1.0, top_p=0.9)] * 6
    logits, uniforms = torch.randn(6, 3000), torch.rand(6, dtype=torch.float64).tolist()
    together = sampling.sample(logits.clone(), shapes_of(params, uniforms), isa=isa)
    for row in range(6):
        one = shapes_of(params[:1], uniforms[row : row + 1])
        assert sampling.sample(logits[row : row + 1].clone(), one, isa=isa).item() == together[row]


def test_numbers_at_both_ends_sample_tokens_that_may_be(isa: library.Isa) -> None:
    logits = torch.full((2, 5000), -torch.inf)
    logits[:, 1203], logits[:, 4100] = 1.0, 1.0
    asked = shapes_of([SamplingParams(temperature=1.0)] * 2, [0.0, 1 - 2.0**-53])
    assert sampling.sample(logits, asked, isa=isa).tolist() == [1203, 4100]


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_first_of_the_largest(isa: library.Isa, vocab: int) -> None:
    logits = torch.randn(9, vocab).round()
    wanted = [row.index(max(row)) for row in logits.tolist()]
    asked = shapes_of([SamplingParams(temperature=0.0)] * 9, [0.5] * 9)
    assert sampling.sample(logits, asked, isa=isa).tolist() == wanted


@pytest.mark.parametrize("vocab", VOCABS)
def test_only_what_the_bits_allow_is_sampled(isa: library.Isa, vocab: int) -> None:
    """Rows with many tokens, with one far from the others, with all, and without a mask; greedy and not, cut and not."""
    torch.manual_seed(vocab)
    params = [
        SamplingParams(temperature=t, top_p=p) for t in (0.0, 1.3) for p in (1.0, 0.7) for _ in range(8)
    ]
    rows = torch.arange(len(params))[1:].flip(0)
    bits = torch.randint(-(2**31), 2**31, (len(rows), (vocab + 31) // 32), dtype=torch.int32)
    bits[:, 0] |= 1
    bits[::4] = 0
    bits[::4, (vocab - 1) // 32] = 1
    bits[1::4] = -1
    masks, asked = Masks(rows, bits), shapes_of(params, torch.rand(len(params), dtype=torch.float64).tolist())
    logits = torch.randn(len(params), vocab) * 3
    wanted = reference.sample(logits.clone(), asked, masks)
    assert torch.equal(sampling.sample(logits.clone(), asked, masks, isa), wanted)
    one = (wanted[rows[::4]] == (vocab - 1) // 32 * 32).tolist()
    assert all(one), "a row with one allowed token samples it"


@pytest.mark.parametrize("vocab", [7, 33, 4101])
def test_what_is_no_number_is_not_sampled_while_there_are_numbers(isa: library.Isa, vocab: int) -> None:
    """Logits of a model that overflows. Weights that are no numbers have no place in the bins by which rows are cut."""
    torch.manual_seed(vocab)
    params = [SamplingParams(**{"temperature": 1.0, **cut}) for cut in [*CUTS, {"temperature": 0.0}]]  # type: ignore[arg-type]
    uniforms = torch.rand(len(params), dtype=torch.float64).tolist()
    logits = torch.randn(len(params), vocab)
    logits[:, ::2] = torch.nan
    logits[:, 2::4] = -torch.nan
    logits[:, 5] = 90.0
    sampled = sampling.sample(logits.clone(), shapes_of(params, uniforms), isa=isa)
    assert sampled.tolist() == [5] * len(params)
    logits[:, 3] = torch.inf
    assert sampling.sample(logits, shapes_of(params, uniforms), isa=isa).tolist() == [3] * len(params)
    nothing = torch.full((len(params), vocab), torch.nan)
    assert sampling.sample(nothing, shapes_of(params, uniforms), isa=isa).tolist() == [0] * len(params)


@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [([6], 32, torch.int32), ([-1], 32, torch.int32), ([0], 31, torch.int32), ([0], 32, torch.int64)]
)  # fmt: skip
def test_masks_that_do_not_fit_are_refused(rows: list[int], width: int, dtype: torch.dtype) -> None:
    masks = Masks(torch.tensor(rows), torch.zeros(len(rows), width, dtype=dtype))
    asked = shapes_of([SamplingParams(temperature=1.0)] * 6, [0.5] * 6)
    with pytest.raises(ValueError, match="native samples take"):
        sampling.sample(torch.zeros(6, 1024), asked, masks)


@pytest.mark.parametrize(
    "logits", [torch.zeros(2, 8, dtype=torch.float64), torch.zeros(8, 2).T, torch.zeros(8)]
)
def test_logits_that_do_not_fit_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="native samples take"):
        sampling.sample(
            logits, shapes_of([SamplingParams(temperature=1.0)] * len(logits), [0.5] * len(logits))
        )
