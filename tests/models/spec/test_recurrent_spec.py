"""Where states lie and where layers can be cut, against what a search over all cuts finds."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.states import StateShape
from models.spec.recurrent_spec import RecurrentSpec, StateKind

SHAPE = StateShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, conv_kernel=4)
SLOT_BYTES = 256


def spec_of(attends: set[int], num_layers: int) -> RecurrentSpec:
    kinds: list[StateKind] = ["kv" if layer in attends else "gated_delta" for layer in range(num_layers)]
    return RecurrentSpec(kinds=tuple(kinds), shape=SHAPE)


def kv_layers_of(kept: RecurrentSpec, layers: range) -> tuple[set[int], set[int]]:
    """The KV layers among these layers, and those in which their states lie."""
    attending = [layer for layer, kind in enumerate(kept.kinds) if kind == "kv"]
    own = {number for number, layer in enumerate(attending) if layer in layers}
    places = kept.places(SLOT_BYTES)
    return own, {place.kv_layer for layer in layers if (place := places[layer]) is not None}


@st.composite
def hybrids(draw: st.DrawFn) -> RecurrentSpec:
    num_layers = draw(st.integers(2, 16))
    layers = st.integers(0, num_layers - 1)
    return spec_of(draw(st.sets(layers, min_size=1, max_size=num_layers - 1)), num_layers)


@given(hybrids())
def test_stages_begin_exactly_where_no_state_is_parted_from_its_kv_layer(kept: RecurrentSpec) -> None:
    num_layers = len(kept.kinds)
    for cut in range(1, num_layers):
        sides = [kv_layers_of(kept, layers) for layers in (range(cut), range(cut, num_layers))]
        is_whole = all(states <= own for own, states in sides)
        assert (cut in kept.stage_starts) == (is_whole and all(own for own, _ in sides))
    assert kept.stage_starts[0] == 0


@given(hybrids())
def test_states_have_slots_of_their_own_and_are_spread_evenly(kept: RecurrentSpec) -> None:
    places = [place for place in kept.places(SLOT_BYTES) if place is not None]
    slots = Counter(
        (place.kv_layer, place.first_slot + slot) for place in places for slot in range(place.num_slots)
    )
    assert max(slots.values()) == 1
    each = Counter(place.kv_layer for place in places)
    assert all(0 <= kv_layer < kept.num_kv_layers for kv_layer in each)
    assert max(each.values()) == -(-len(places) // kept.num_kv_layers)
    assert kept.num_slots(SLOT_BYTES) == max(each.values()) * places[0].num_slots


@pytest.mark.parametrize(
    ("attends", "num_layers", "starts"),
    [
        pytest.param({*range(3, 48, 4)}, 48, tuple(range(0, 48, 4)), id="Qwen3-Next-80B"),
        pytest.param({5, 15, 25, 35}, 40, (0, 10, 20, 30), id="Granite-4.0-H-Tiny and -Small"),
        pytest.param({10, 13, 17, 27}, 32, (0, 16, 24), id="attention in the middle"),
        pytest.param({3, 4, 5}, 6, (0,), id="all attention behind all states"),
    ],
)
def test_published_shapes_are_cut_without_waste(
    attends: set[int], num_layers: int, starts: tuple[int, ...]
) -> None:
    kept = spec_of(attends, num_layers)
    assert kept.stage_starts == starts
    (num_slots,) = {place.num_slots for place in kept.places(SLOT_BYTES) if place is not None}
    num_states = num_layers - len(attends)
    assert kept.num_slots(SLOT_BYTES) * len(attends) == num_states * num_slots
