"""What cannot be is said before anything starts, with what could be instead."""

import pytest

from cluster.ingress.model_card import read_model_card
from core.config.cluster_config import load
from core.errors import ConfigError


def test_experts_stay_in_one_place_where_answers_must_have_the_same_bits() -> None:
    with pytest.raises(ConfigError, match=r"needs decode\.ep_redundant_experts"):
        load(None, {}, {"engine.deterministic": True, "decode.ep": 2, "decode.ep_balance_interval_s": 60})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"decode.tp": 64}, ("decode: tp 64 is impossible", "Nearest possible: decode.tp=")),
        ({"prefill.pp": 64}, ("prefill: pp 64 is impossible", "layers cannot fill 64 pipeline stages")),
        ({"prefill.ep": 2}, ("no experts to spread", "ep=1")),
    ],
)
def test_meshes_that_the_model_cannot_fill(keys: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        read_model_card(load(None, {}, keys))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_the_nearest_possible_mesh_is_possible() -> None:
    with pytest.raises(ConfigError) as refused:
        read_model_card(load(None, {}, {"decode.tp": 64, "decode.pp": 64}))
    named = str(refused.value).rpartition("Nearest possible: ")[2].replace("decode.", "")
    keys = {f"decode.{axis}": int(size) for axis, size in (part.split("=") for part in named.split(", "))}
    read_model_card(load(None, {}, keys))
