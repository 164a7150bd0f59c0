"""What a resumed answer adds to the ledger of usage."""

import pytest

from cluster.ingress.generation.answer_identity import Begun
from cluster.ingress.generation.choices import ChoiceStream, TextPiece, UsageCounter
from cluster.ingress.generation.detokenize import TextStream
from core.types import FinishReason, Request, SamplingParams, TokenOut
from models.files.hub import resolve
from models.text.tokenizer import load_tokenizer

LENGTH = 6
TOKENIZER = load_tokenizer(resolve("embedded"))


def counter(num_noted: int) -> UsageCounter:
    request = Request(id="r", prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=LENGTH), reply_to="")
    choice = ChoiceStream(0, request, TextStream(TOKENIZER, request.prompt), begun=Begun(num_noted=num_noted))
    counter = UsageCounter([choice], 1)
    for index in range(LENGTH):
        finish = FinishReason.LENGTH if index == LENGTH - 1 else None
        token = TokenOut(request_id="r", attempt=0, index=index, token=7, finish=finish, num_cached=2)
        counter.count(TextPiece(0, token, token.finish, is_reasoning=index < 3, at=float(index)))
    return counter


def test_an_answer_whose_ingress_was_lost_is_noted_whole() -> None:
    found = counter(num_noted=0).counts
    assert found is not None
    assert (found.num_requests, found.prompt_tokens, found.cached_tokens) == (1, 3, 2)
    assert (found.output_tokens, found.reasoning_tokens) == (LENGTH, 3)


def test_what_an_ingress_has_noted_is_not_noted_again() -> None:
    found = counter(num_noted=2).counts
    assert found is not None
    assert (found.num_requests, found.prompt_tokens, found.cached_tokens) == (0, 0, 0)
    assert (found.output_tokens, found.reasoning_tokens) == (LENGTH - 2, 1)
    assert counter(num_noted=LENGTH).counts is None


@pytest.mark.parametrize("num_noted", [0, 2, LENGTH])
def test_a_client_is_told_of_the_whole_answer(num_noted: int) -> None:
    assert counter(num_noted).usage["completion_tokens"] == LENGTH
