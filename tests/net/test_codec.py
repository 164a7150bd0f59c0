from typing import get_args

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.errors import ProtocolError
from core.messages import Cancel, Message, PlaceReply, PlaceRequest
from core.reports import LoadReport
from core.types import STANDARD, Route
from net.codec import decode, encode

ints = st.integers(-(2**63), 2**64 - 1)
st.register_type_strategy(int, ints)
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(str, st.text(st.characters(exclude_categories=("Cs",)), max_size=12))


@pytest.mark.parametrize("kind", get_args(Message), ids=lambda kind: kind.__name__)
def test_every_message_survives_the_wire(kind: type) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.from_type(kind))
    def check(message: Message) -> None:
        assert decode(encode(message)) == message

    check()


@given(st.binary(max_size=64))
def test_noise_is_refused_not_believed(data: bytes) -> None:
    try:
        decode(data)
    except ProtocolError:
        return
    assert msgpack.unpackb(data)[0] in {kind.__name__ for kind in get_args(Message)}


@pytest.mark.parametrize(
    "plain",
    [
        ["Cancel", "r"],
        ["Cancel", 1, 0],
        ["Cancel", "r", "0"],
        ["Cancel", "r", True],
        ["os.system", "ls"],
        [],
        {},
    ],
)
def test_what_does_not_fit_its_types_is_refused(plain: object) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb(plain))


def test_messages_whose_class_was_renamed_keep_their_name_on_the_wire() -> None:
    reply = PlaceReply("r", 1, Route("d"))
    assert msgpack.unpackb(encode(reply))[0] == "Placed"
    assert decode(msgpack.packb(["Placed", "r", 1, ["d"]])) == reply
    asked = PlaceRequest(
        request_id="r", attempt=0, num_tokens=3, max_new_tokens=1, block_hashes=(), slo=STANDARD
    )
    assert msgpack.unpackb(encode(asked))[0] == "Place"
    assert decode(encode(asked)) == asked


def test_fields_of_a_newer_peer_are_ignored_and_of_an_older_one_defaulted() -> None:
    assert decode(msgpack.packb(["Cancel", "r", 3, "new field"])) == Cancel("r", 3)
    report = decode(msgpack.packb(["LoadReport", "a", 1, 2, 3, 4, 5, 6.0, 7]))
    assert report == LoadReport(
        address="a",
        seq=1,
        free_blocks=2,
        waiting_tokens=3,
        num_waiting=4,
        num_running=5,
        tokens_per_s=6.0,
        step_s=7.0,
    )
