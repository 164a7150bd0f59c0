"""Two sides agree on what KV they exchange, or are refused by name."""

from dataclasses import replace

import msgpack
import pytest

from core.errors import TransferError
from core.kv import KVLayout, KVShard
from core.messages import Grant, RegionKey, StartPrefill
from core.types import Request, SamplingParams
from kvtransfer.wire import (
    POOL_FORMAT,
    agree,
    check_compatible,
    check_grant,
    content_of,
    content_of_region,
    pack,
    unpack,
)
from net.codec import decode, encode

LAYOUT = KVLayout(num_layers=4, num_kv_heads=4, head_dim=8, block_size=16, dtype="bfloat16")
SHARD = KVShard.whole(LAYOUT)
OURS = content_of(SHARD, "rev1")


def region(shard: KVShard = SHARD, content: bytes = b"") -> RegionKey:
    return RegionKey(
        transport="tcp",
        endpoint="10.0.0.2:1",
        name=POOL_FORMAT,
        host="",
        shard=shard,
        num_blocks=8,
        content=content,
    )


def test_a_description_survives_the_wire_and_skips_what_a_newer_release_added() -> None:
    assert unpack(pack(OURS)) == OURS
    newer = msgpack.packb({**msgpack.unpackb(pack(OURS)), "colour": "blue"})
    assert unpack(newer) == OURS


def test_it_travels_in_a_grant_and_an_older_release_may_leave_it_out() -> None:
    grant = Grant(
        id="g",
        key="k",
        epoch=0,
        holder="h",
        incarnation="i",
        regions=(region(content=pack(OURS)),),
        block_ids=(1,),
        first_token=0,
        num_tokens=16,
        ttl_s=1.0,
    )
    message = StartPrefill(Request(id="r", prompt=(1,), sampling=SamplingParams(), reply_to="f"), grant)
    assert decode(encode(message)) == message
    old = msgpack.unpackb(encode(message))
    del old[2][5][0][6:]  # what came after `num_blocks`
    read = decode(msgpack.packb(old))
    assert isinstance(read, StartPrefill)
    assert read.grant.regions[0].content == b""
    assert check_compatible(SHARD, read.grant.regions[0], "rev1") == 1


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": "rev2"}, "revision"),
        ({"state": "mla"}, "state"),
        ({"num_layers": 5}, "layers"),
        ({"num_heads": 8}, "KV heads"),
        ({"head_dim": 16}, "dimension"),
        ({"packing": "other-9"}, "packing"),
        ({"dtype": "int8"}, "no conversion"),
        ({"dtype": "float4"}, "no conversion"),
        ({"speaks": (3, 4)}, "versions 3 to 4"),
        ({"requires": ("rotated-keys",)}, "rotated-keys"),
    ],
)
def test_what_cannot_be_right_is_refused_with_both_sides_named(changes: dict[str, object], word: str) -> None:
    theirs = replace(OURS, software="baton 9.9", **changes)
    with pytest.raises(TransferError, match=word) as refused:
        agree(OURS, theirs, "prefill 10.0.0.1:5", "decode 10.0.0.2:6")
    for side in ("prefill 10.0.0.1:5", "decode 10.0.0.2:6", "baton 9.9", OURS.software):
        assert side in str(refused.value)


@pytest.mark.parametrize(
    ("a", "b", "version"),
    [((1, 1), (1, 2), 1), ((1, 3), (2, 2), 2), ((2, 5), (3, 9), 5), ((1, 2), (2, 3), 2)],
)
def test_neighbouring_releases_use_the_highest_version_that_both_speak(
    a: tuple[int, int], b: tuple[int, int], version: int
) -> None:
    assert agree(replace(OURS, speaks=a), replace(OURS, speaks=b)) == version


@pytest.mark.parametrize(
    ("mine", "its"),
    [
        (("float32", "none"), ("bfloat16", "none")),
        (("bfloat16", "none"), ("float8_e4m3fn", "none")),
        (("bfloat16", "none"), ("int8", "vector")),
        (("int8", "vector"), ("bfloat16", "none")),
    ],
)
def test_storage_layers_and_heads_may_differ(mine: tuple[str, str], its: tuple[str, str]) -> None:
    ours = KVShard(replace(LAYOUT, dtype=mine[0], scales=mine[1]), (0, 2), (0, 4))
    theirs = KVShard(replace(LAYOUT, block_size=4, dtype=its[0], scales=its[1]), (0, 4), (2, 4))
    assert check_compatible(ours, region(theirs, pack(content_of(theirs)))) == 1


def test_a_description_that_contradicts_the_layout_is_refused() -> None:
    lie = pack(replace(OURS, heads=(0, 2)))
    with pytest.raises(TransferError, match="lays it out"):
        check_compatible(SHARD, region(content=lie))


def with_value(name: str, value: object) -> bytes:
    return msgpack.packb({**msgpack.unpackb(pack(OURS)), name: value})


@pytest.mark.parametrize(
    "data",
    [
        *(b"\xc1", msgpack.packb([1]), msgpack.packb("model"), msgpack.packb({"model": "x"})),
        *(with_value("speaks", pair) for pair in ([1, "1"], [1], [None, None], 1)),
        *(with_value("requires", names) for names in ([[]], [None], "base", [{}])),
        *(
            with_value(name, value)
            for name, value in (("num_heads", "4"), ("heads", [0, [4]]), ("dtype", []))
        ),
    ],
)
def test_rubbish_is_a_transfer_error(data: bytes) -> None:
    with pytest.raises(TransferError):
        content_of_region(region(content=data))


def test_a_grant_of_blocks_that_hold_nothing_is_refused() -> None:
    empty = region(replace(SHARD, layout=replace(LAYOUT, block_size=0)))
    with pytest.raises(TransferError, match="hold 0 tokens"):
        check_grant(
            Grant(
                id="g",
                key="k",
                epoch=0,
                holder="h",
                incarnation="i",
                regions=(empty,),
                block_ids=(1,),
                first_token=0,
                num_tokens=1,
                ttl_s=1.0,
            )
        )


@pytest.mark.parametrize(
    ("blocks", "first", "count"), [((), 0, 1), ((1,), 0, 17), ((1,), 3, 4), ((9,), 0, 4), ((1,), 0, 0)]
)
def test_a_grant_whose_blocks_do_not_hold_its_tokens_is_refused(
    blocks: tuple[int, ...], first: int, count: int
) -> None:
    with pytest.raises(TransferError):
        check_grant(
            Grant(
                id="g",
                key="k",
                epoch=0,
                holder="h",
                incarnation="i",
                regions=(region(),),
                block_ids=blocks,
                first_token=first,
                num_tokens=count,
                ttl_s=1.0,
            )
        )


@pytest.mark.parametrize(
    ("its", "word"),
    [
        (replace(LAYOUT, block_size=8, state_blocks=4), ""),
        (replace(LAYOUT, state_blocks=3), "recurrent state"),
        (LAYOUT, "recurrent state"),
        (replace(LAYOUT, state_blocks=2, dtype="float32"), "no conversion"),
    ],
)
def test_a_recurrent_state_goes_only_where_it_is_kept_alike(its: KVLayout, word: str) -> None:
    ours, theirs = (KVShard.whole(layout) for layout in (replace(LAYOUT, state_blocks=2), its))
    held = region(theirs, pack(content_of(theirs)))
    if not word:
        assert check_compatible(ours, held) == 1
        return
    with pytest.raises(TransferError, match=word):
        check_compatible(ours, held)


@pytest.mark.parametrize(("mine", "its"), [((0, 2), (0, 4)), ((0, 4), (2, 4)), ((2, 4), (0, 2))])
def test_stages_hand_recurrent_states_over_as_keys_and_values(
    mine: tuple[int, int], its: tuple[int, int]
) -> None:
    layout = replace(LAYOUT, state_blocks=2)
    ours, theirs = KVShard(layout, mine, (0, 4)), KVShard(layout, its, (2, 4))
    assert check_compatible(ours, region(theirs, pack(content_of(theirs)))) == 1


def test_a_release_that_knows_no_recurrent_states_is_told_that_it_must() -> None:
    assert content_of(KVShard.whole(replace(LAYOUT, state_blocks=2))).requires == ("states",)
