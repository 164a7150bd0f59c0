"""The choice of experts in one launch, against its definition and PyTorch's, over the ways of models."""

import pytest
import torch

from kernels.routing import Routing
from kernels.torch.experts import route as reference
from kernels.torch.experts import top_stable
from kernels.triton.route import route

ROUTINGS = {
    "mixtral": (8, Routing(top_k=2)),
    "qwen2_moe": (60, Routing(top_k=4, renormalise=False)),
    "qwen3_moe": (128, Routing(top_k=8)),
    "deepseek_v2": (160, Routing(top_k=6, renormalise=False, scale=16.0, num_groups=8, top_groups=3)),
    "deepseek_v3": (
        256,
        Routing(
            top_k=8, scoring="sigmoid", renormalise=True, scale=2.5, num_groups=8, top_groups=4, group_best=2
        ),
    ),
    "odd groups": (
        15,
        Routing(
            top_k=3, scoring="sigmoid", renormalise=True, scale=1.0, num_groups=3, top_groups=2, group_best=2
        ),
    ),
    "one": (5, Routing(top_k=1)),
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_it_is_the_reference(device: torch.device, name: str, biased: bool) -> None:
    num_experts, routing = ROUTINGS[name]
    logits = torch.randn(7, num_experts, device=device) * 2
    bias = torch.randn(num_experts, device=device) * 0.2 if biased else None
    experts, weights = route(logits, bias, routing)
    want_experts, want_weights = reference(logits, bias, routing, top_stable)
    assert torch.equal(experts, want_experts)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7)
    assert (experts.dtype, weights.dtype) == (torch.int64, torch.float32)
    assert route(logits[:0], bias, routing)[0].shape == (0, routing.top_k)


def test_of_equal_experts_the_first_are_chosen(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0], [0.0] * 5], device=device)
    experts, weights = route(logits, None, Routing(top_k=2))
    assert experts.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(weights, torch.full((2, 2), 0.5, device=device))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter is numpy
@pytest.mark.parametrize("routing", [Routing(top_k=3), Routing(top_k=3, num_groups=2, top_groups=1)])
def test_a_row_that_is_no_number_chooses_experts_that_there_are(
    device: torch.device, routing: Routing
) -> None:
    """Others' counts and weights are indexed with what is chosen."""
    logits = torch.randn(3, 6, device=device)
    want = route(logits, None, routing)
    logits[1] = torch.nan
    experts, weights = route(logits, None, routing)
    assert experts.ge(0).all()
    assert experts.lt(6).all()
    for got, other in ((experts, want[0]), (weights, want[1])):
        assert torch.equal(got[[0, 2]], other[[0, 2]])
