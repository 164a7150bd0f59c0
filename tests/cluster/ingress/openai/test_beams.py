"""What clients say of beam search, and what they get."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.ingress.delivery.beam_search import BeamParams
from cluster.ingress.delivery.search_steps import Found
from core.errors import Overloaded
from core.types import FinishReason, Request, TokenOut
from tests.cluster.ingress.api.fakes import END, FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, COMPLETIONS, OK, Api

BEAMS = {"use_beam_search": True}


class Searcher(FakeGenerator):
    """Finds "best", "2nd", "3rd" and so on, each with the end token."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Request, BeamParams, int]] = []
        self.failure: Exception | None = None

    async def search(self, request: Request, params: BeamParams, count: int) -> Found:
        self.asked.append((request, params, count))
        if self.failure is not None:
            raise self.failure
        texts = ["best", "2nd", "3rd", "4th"][:count]
        return Found(tuple(_tokens(request, [*text.encode(), END]) for text in texts), num_sampled=17)


def _tokens(request: Request, ids: list[int]) -> tuple[TokenOut, ...]:
    wanted = request.sampling.num_logprobs
    return tuple(
        TokenOut(
            request_id=request.id,
            attempt=0,
            index=index,
            token=token,
            logprob=-0.5 if wanted >= 0 else None,
            top=((65, -0.25), (66, -0.5))[: max(0, wanted)],
            finish=FinishReason.STOP if token == END else None,
        )
        for index, token in enumerate(ids)
    )


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = Api(Searcher())
    yield api
    await api.http.aclose()


def asked(api: Api) -> list[tuple[Request, BeamParams, int]]:
    assert isinstance(api.generator, Searcher)
    return api.generator.asked


async def test_the_best_of_as_many_beams_are_the_choices(api: Api) -> None:
    body = {**OK, **BEAMS, "n": 2, "best_of": 4, "length_penalty": 0.5, "early_stopping": True, "logprobs": 1}
    answer = (await api.post(COMPLETIONS, body)).json()
    assert [choice["text"] for choice in answer["choices"]] == ["best", "2nd"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 5
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (1, 9, 10)
    ((request, params, count),) = asked(api)
    assert (params, count) == (BeamParams(4, 0.5, True), 2)
    assert request.sampling.stop_token_ids == (END,)


async def test_chats_are_searched_with_n_beams(api: Api) -> None:
    answer = (await api.post(CHATS, {**CHAT, **BEAMS, "n": 3, "early_stopping": "never"})).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["best", "2nd", "3rd"]
    assert [one[1:] for one in asked(api)] == [(BeamParams(3, 1.0, "never"), 3)]


async def test_each_prompt_is_searched_by_itself(api: Api) -> None:
    answer = (await api.post(COMPLETIONS, {**OK, **BEAMS, "prompt": ["a", "b"], "n": 2})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["best", "2nd"] * 2
    assert [request.prompt for request, _, _ in asked(api)] == [(97,), (98,)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True),
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("top_k", 3),
        ("min_p", 0.1),
        ("repetition_penalty", 1.5),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("logit_bias", {"65": 1.0}),
        ("allowed_token_ids", [65]),
        ("bad_words", ["x"]),
        ("min_tokens", 2),
        ("stop", "x"),
        ("prompt_logprobs", 1),
    ],
)
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, OK), (CHATS, CHAT)])
async def test_what_does_not_go_with_it_is_refused_by_name(
    api: Api, path: str, body: dict[str, Any], name: str, value: Any
) -> None:
    answer = await api.post(path, {**body, **BEAMS, name: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert f"{name} does not go with use_beam_search" in error["message"]
    assert asked(api) == []


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 128, "stop_token_ids": list(range(40))}, "use_beam_search"),
        ({"n": 4, "best_of": 2}, "best_of"),
        ({"n": 200}, "n"),
    ],
)
async def test_searches_that_cannot_be_made_are_refused(api: Api, more: dict[str, Any], field: str) -> None:
    answer = await api.post(COMPLETIONS, {**OK, **BEAMS, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("name", ["length_penalty", "early_stopping"])
async def test_its_parameters_mean_nothing_without_it(api: Api, name: str) -> None:
    answer = await api.post(COMPLETIONS, {**OK, name: 2.0 if name == "length_penalty" else True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    neutral = await api.post(COMPLETIONS, {**OK, name: 1.0 if name == "length_penalty" else False})
    assert neutral.status_code == 200


async def test_a_search_that_finds_no_room_is_a_429(api: Api) -> None:
    assert isinstance(api.generator, Searcher)
    api.generator.failure = Overloaded("full", retry_after_s=3.0)
    answer = await api.post(COMPLETIONS, {**OK, **BEAMS})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
