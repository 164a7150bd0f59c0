"""Which instances may share a card, and what is refused before anything starts."""

from typing import Any

import pytest

from core.config.cluster_config import load
from core.errors import ConfigError

SHARED: dict[str, Any] = {"engine.device": "cuda", "prefill.gpu_share": 0.4, "decode.gpu_share": 0.6}


def test_a_prefill_and_a_decode_instance_share_a_card_and_its_processors() -> None:
    config = load(None, {}, {**SHARED, "prefill.sm_share": 0.7})
    assert config.prefill.shares_card
    assert (config.prefill.most_sms, config.decode.most_sms) == (0.7, 0.6)
    whole = load(None, {})
    assert not whole.decode.shares_card
    assert whole.decode.most_sms == 1


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"decode.gpu_share": 0.7}, r"gpu_share 0\.4 and decode\.gpu_share 0\.7 are 1\.1 of a card"),
        ({"prefill.gpu_share": 1}, r"gpu_share 1 and decode\.gpu_share 0\.6 are 1\.6 of a card"),
        ({"decode.gpu_share": 1}, r"are 1\.4 of a card"),
        ({"decode.tp": 2}, "decode.gpu_share is 0.6, and an instance has 2 ranks"),
        ({"prefill.dp": 2}, "prefill.gpu_share is 0.4, and an instance has 2 ranks"),
        ({"prefill_instances": 0}, "prefill_instances is 0"),
        ({"engine.device": "auto"}, r"set engine\.device to cuda \(it is auto\)"),
        ({"transfer.transport": "nccl"}, "NCCL joins no two processes on one card"),
        ({"prefill.gpu_share": 0}, "prefill.gpu_share must be a number of more than 0"),
    ],
)
def test_what_cannot_share_a_card_is_refused_by_name(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(None, {}, {**SHARED, **keys})


def test_a_share_of_processors_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"decode\.sm_share bounds an instance on a shared card"):
        load(None, {}, {"decode.sm_share": 0.5})
