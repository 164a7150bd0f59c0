from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from parallel.mesh import Mesh
from parallel.plans import Dims, balanced_cuts, check, even_part, part_of, stage_layers


def dims(heads: int = 4, kv_heads: int = 2, layers: int = 4, experts: int = 0, vocab: int = 61) -> Dims:
    return Dims(
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=vocab,
        widths=(48,),
        layer_weights=(100,) * layers,
        embedding_weights=10,
        head_weights=10,
        num_experts=experts,
    )


@given(st.integers(1, 40), st.integers(1, 12))
def test_even_parts_tile_and_differ_by_one_at_most(size: int, num_parts: int) -> None:
    parts = [even_part(size, num_parts, index) for index in range(num_parts)]
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    sizes = [end - first for first, end in parts]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_every_query_head_is_held_once_beside_its_own_kv_head(
    kv_heads: int, repeats: int, data: st.DataObject
) -> None:
    model = dims(kv_heads * repeats, kv_heads)
    mesh = Mesh(tp=data.draw(st.integers(1, kv_heads * repeats)))
    check(model, mesh, "prefill")
    held: list[int] = []
    for rank in range(mesh.tp):
        part = part_of(model, mesh, rank)
        heads, own = range(*part.heads), range(*part.kv_heads)
        held += heads
        assert len(heads) % len(own) == 0
        share = len(heads) // len(own)
        assert [head // repeats for head in heads] == [kv for kv in own for _ in range(share)]
    assert held == list(range(model.num_heads))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_balanced_cuts_are_the_best_of_all(weights: list[int], data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, len(weights)))
    parts = balanced_cuts(weights, num_parts)
    assert [layer for part in parts for layer in range(*part)] == list(range(len(weights)))
    assert all(first < end for first, end in parts)

    def heaviest(edges: tuple[int, ...]) -> int:
        return max(sum(weights[a:b]) for a, b in pairwise((0, *edges, len(weights))))

    best = min(heaviest(edges) for edges in combinations(range(1, len(weights)), num_parts - 1))
    assert max(sum(weights[a:b]) for a, b in parts) == best


def test_the_embedding_and_the_head_make_their_stages_shorter() -> None:
    heavy = Dims(
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=61,
        widths=(48,),
        layer_weights=(100,) * 6,
        embedding_weights=100,
        head_weights=300,
    )
    assert stage_layers(heavy, 2) == [(0, 4), (4, 6)]
    assert stage_layers(heavy, 3) == [(0, 2), (2, 5), (5, 6)]


def test_layers_that_must_stay_together_are_balanced_in_groups() -> None:
    bound = replace(dims(layers=10), stage_starts=(0, 3, 4, 8))
    assert [stage_layers(bound, pp) for pp in (1, 2, 3, 4)] == [
        [(0, 10)],
        [(0, 4), (4, 10)],
        [(0, 4), (4, 8), (8, 10)],
        [(0, 3), (3, 4), (4, 8), (8, 10)],
    ]
    with pytest.raises(ConfigError, match=r"10 layers cannot fill 5.*cut into 4 at most.*pp=4"):
        check(bound, Mesh(pp=5), "decode")


@pytest.mark.parametrize(
    ("mesh", "reason", "nearest"),
    [
        (Mesh(tp=6), "4 attention heads", "tp=4, pp=1"),
        (Mesh(pp=9, tp=2), "4 layers cannot fill 9", "tp=2, pp=4"),
        (Mesh(ep=2), "no experts", "ep=1"),
    ],
)
def test_impossible_meshes_are_refused_with_the_nearest_possible(
    mesh: Mesh, reason: str, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        check(dims(), mesh, "decode")
    assert nearest in str(refused.value)
    assert str(refused.value).startswith("decode:")


@pytest.mark.parametrize(
    ("experts", "ep", "spare", "words"),
    [
        (8, 1, 2, "needs experts that are spread"),
        (0, 1, 2, "needs experts"),
        (8, 4, 3, "possible: 4"),
        (4, 2, 9, ": 4"),
    ],
)
def test_copies_of_experts_that_cannot_be_are_refused(experts: int, ep: int, spare: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(dims(experts=experts), Mesh(ep=ep), "decode", spare)
    check(dims(experts=6), Mesh(ep=4), "decode", 2)


def test_groups_with_sequences_of_their_own_need_experts_to_share() -> None:
    with pytest.raises(ConfigError, match=r"better instances of their own.*dp=1"):
        check(dims(), Mesh(dp=2), "decode")
    with pytest.raises(ConfigError, match=r"8 experts cannot be spread evenly over 6 ranks.*dp=2, ep=4"):
        check(dims(experts=8), Mesh(dp=2, ep=3), "decode")
    check(dims(experts=8), Mesh(dp=2, ep=4, tp=2), "decode")


@given(st.integers(1, 12), st.integers(1, 14))
def test_experts_are_spread_evenly_or_the_nearest_divisor_is_named(experts: int, ep: int) -> None:
    model = dims(experts=experts)
    if experts % ep == 0:
        check(model, Mesh(ep=ep), "decode")
        return
    with pytest.raises(ConfigError) as refused:
        check(model, Mesh(ep=ep), "decode")
    named = int(str(refused.value).rpartition("ep=")[2])
    assert experts % named == 0
    assert all(abs(named - ep) <= abs(d - ep) for d in range(1, experts + 1) if experts % d == 0)
