"""What a soak compares and counts."""

import json

import pytest

from benchmarks.soak.soak_clients import Tally
from benchmarks.soak.soak_requests import Streamed, lasting, requests
from benchmarks.soak.soak_watch import Sample, growth

MIB = 1 << 20


def sent(*texts: str) -> bytes:
    events = [{"id": "c1", "choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    events.append({"id": "c1", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    return (
        b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    )


def read(*pieces: bytes) -> Streamed:
    streamed = Streamed()
    for piece in pieces:
        streamed.feed(piece)
    return streamed


def test_a_stream_is_the_same_answer_however_its_text_is_cut() -> None:
    whole = read(sent("one two three"))
    assert whole.is_over
    assert whole.answer == read(sent("one", " two th", "ree")).answer
    cut = sent("one two ", "three")
    assert whole.answer == read(*(cut[at : at + 1] for at in range(len(cut)))).answer
    assert whole.answer != read(sent("one two thre")).answer
    assert not read(sent("one two three")[:-20]).is_over


def test_an_answer_is_compared_without_what_is_another_each_time() -> None:
    first = {"id": "a", "created": 1, "choices": [{"text": "x", "logprobs": [-0.12341]}]}
    assert lasting(first) == lasting(
        {**first, "id": "b", "created": 2, "choices": [{"text": "x", "logprobs": [-0.12339]}]}
    )
    assert lasting(first) != lasting({**first, "choices": [{"text": "y", "logprobs": [-0.12341]}]})


def test_only_what_could_not_be_stored_may_say_so() -> None:
    asked = next(one for one in requests() if one.path == "/v1/responses")
    tally = Tally(expected={asked.name: {"output": "x", "store": True}})
    for output, store in (("x", True), ("x", False), ("y", False)):
        tally.judge(asked, {"output": output, "store": store}, 0.0)
    assert (tally.right[asked.name], tally.num_unstored, len(tally.wrong)) == (2, 1, 1)


def test_each_request_has_a_name_of_its_own_and_is_greedy_or_seeded() -> None:
    asked = requests()
    assert len({one.name for one in asked}) == len(asked)
    for one in asked:
        assert one.path == "/tokenize" or one.body.get("temperature") == 0 or "seed" in one.body, one.name


@pytest.mark.parametrize(("grows", "leaks"), [(0, 0), (1, 0), (0, 1)])
def test_growth_is_from_the_warm_up_to_the_end(grows: int, leaks: int) -> None:
    samples = [
        Sample(
            float(at),
            (100 if at < 100 else 300) * MIB + grows * at * MIB // 10,
            20 + at % 5 + leaks * at // 50,
        )
        for at in range(400)
    ]
    found = growth("ingress1", samples, 100.0)
    assert (found.rss_bytes[1] > found.rss_bytes[0] * 1.02) == bool(grows)
    assert (found.descriptors[1] > found.descriptors[0]) == bool(leaks)
