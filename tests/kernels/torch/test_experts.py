"""Routing and experts against their definitions, token by token, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ops import ExpertWeights
from kernels.routing import Routing
from kernels.select import select_ops

OPS = select_ops(torch.device("cpu"))
ROUTINGS = st.one_of(
    st.builds(
        Routing,
        top_k=st.integers(1, 5),
        scoring=st.sampled_from(("softmax", "sigmoid")),
        renormalise=st.booleans(),
        scale=st.sampled_from((1.0, 2.5)),
    ),
    st.builds(
        Routing,
        top_k=st.integers(1, 4),
        scoring=st.sampled_from(("softmax", "sigmoid")),
        renormalise=st.booleans(),
        num_groups=st.just(4),
        top_groups=st.integers(2, 4),
        group_best=st.integers(1, 2),
    ),
)  # fmt: skip


def choose(scores: list[float], bias: list[float], routing: Routing) -> dict[int, float]:
    """Expert -> weight, of one token."""
    worth = [a + b for a, b in zip(scores, bias, strict=True)]
    size = len(scores) // routing.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(routing.num_groups)]
    groups.sort(key=lambda group: -sum(sorted((worth[i] for i in group), reverse=True)[: routing.group_best]))
    allowed = [i for group in groups[: routing.top_groups] for i in group]
    chosen = sorted(allowed, key=lambda i: -worth[i])[: routing.top_k]
    total = sum(scores[i] for i in chosen) if routing.renormalise else 1.0
    return {i: scores[i] / total * routing.scale for i in chosen}


@given(routing=ROUTINGS, seed=st.integers(0, 1000), biased=st.booleans())
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_routing(routing: Routing, seed: int, biased: bool) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(6, 8)
    bias = torch.randn(8) if biased else None
    experts, weights = OPS.route(logits, bias, routing)
    assert (experts.dtype, weights.dtype) == (torch.int64, torch.float32)
    exact = logits.double()
    scores = exact.sigmoid() if routing.scoring == "sigmoid" else exact.softmax(-1)
    plain = [0.0] * 8 if bias is None else bias.double().tolist()
    for token in range(6):
        want = choose(scores[token].tolist(), plain, routing)
        got = dict(zip(experts[token].tolist(), weights[token].tolist(), strict=True))
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 3e-2)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_each_rows_weighted_sum(dtype: torch.dtype, tolerance: float, biased: bool) -> None:
    torch.manual_seed(int(biased))
    num_rows, num_slots, hidden, inner = 23, 5, 12, 7
    x = torch.randn(num_rows, hidden, dtype=dtype)
    held = ExpertWeights(
        torch.randn(num_slots, 2 * inner, hidden, dtype=dtype) / 4,
        torch.randn(num_slots, hidden, inner, dtype=dtype) / 4,
        torch.randn(num_slots, 2 * inner, dtype=dtype) if biased else None,
    )
    slots = torch.randint(-1, num_slots - 1, (num_rows, 3))  # nobody goes to the last one
    slots[4] = -1
    weights = torch.rand(num_rows, 3)
    got = OPS.experts(x, slots, weights, held, OPS.silu_mul)
    want = torch.zeros(num_rows, hidden, dtype=torch.float64)
    for row in range(num_rows):
        for slot, weight in zip(slots[row].tolist(), weights[row].tolist(), strict=True):
            if slot >= 0:
                both = held.gate_up[slot].double() @ x[row].double()
                if held.gate_up_bias is not None:
                    both += held.gate_up_bias[slot].double()
                gate, up = both.chunk(2)
                want[row] += weight * (held.down[slot].double() @ (gate / (1 + torch.exp(-gate)) * up))
    assert got.dtype == dtype
    assert (got[4] == 0).all()
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
    empty = OPS.experts(x[:0], slots[:0], weights[:0], held, OPS.silu_mul)
    assert empty.shape == (0, hidden)
