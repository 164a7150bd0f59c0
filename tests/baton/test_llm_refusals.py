"""`LLM` is the API's twin: it refuses what the API refuses, by the same name, and goes on."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton import LLM, SamplingParams
from cluster.ingress.api_factory import api_settings
from core.errors import ReplicaLost, RequestError
from core.types import Grammar, ThinkingBudget
from engine.planning.step_scheduler import StepScheduler
from models.files.hub import resolve
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import COMPLETIONS, Api
from tests.cluster.ingress.openai.test_embeddings import checkpoint
from tests.processes import children

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = "def f("
FAR = 999_999
REFUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # (SamplingParams, the same in a client's body)
    *(({name: value}, {name: value}) for name, values in {
        "temperature": (-0.1, 2.5, "hot"),
        "top_p": (0.0, 1.5),
        "top_k": (-2,),
        "min_p": (-0.5, 2.0),
        "repetition_penalty": (0.0, 11.0),
        "presence_penalty": (2.5,),
        "frequency_penalty": (-2.5,),
        "seed": (2**63, 2**70, -(2**70), 1.5),
        "max_tokens": (-1, 100_000, "many"),
        "min_tokens": (-1, 7),
    }.items() for value in values),
    ({"allowed_token_ids": (FAR,)}, {"allowed_token_ids": [FAR]}),
    ({"allowed_token_ids": (-1,)}, {"allowed_token_ids": [-1]}),
    ({"stop_token_ids": (FAR,)}, {"stop_token_ids": [FAR]}),
    ({"logit_bias": ((FAR, 1.0),)}, {"logit_bias": {str(FAR): 1.0}}),
    ({"logit_bias": ((5, 101.0),)}, {"logit_bias": {"5": 101.0}}),
    ({"logit_bias": ((-5, 1.0),)}, {"logit_bias": {"-5": 1.0}}),
]  # fmt: skip
REFUSED_HERE: list[dict[str, Any]] = [
    *({"temperature": value} for value in (nan, inf)),
    {"frequency_penalty": nan},
    {"logit_bias": ((5, nan),)},
    {"logit_bias": ((5, 1.0), (5, 2.0))},
    {"logit_bias": (5,)},
    *({"bad_words": words} for words in (((FAR,),), ((),), ("text",))),
    *({"num_logprobs": value} for value in (-2, 21)),
    *({"num_prompt_logprobs": value} for value in (-2, 21)),
    {"allowed_token_ids": (5,), "bad_words": ((5,),)},
    {"pooling": "last"},
    {"second_text_at": 2},
    {"thinking": ThinkingBudget(max_tokens=1, begin=(), end=(FAR,), forced=())},
    {"thinking": ThinkingBudget(max_tokens=1, begin=(), end=(), forced=(5,))},
    {"grammar": Grammar(text="nonsense((")},
    {"grammar": Grammar(text='start: "a"'), "bad_words": ((5,),)},
    {"grammar": Grammar(text='start: "a"', think_end=FAR)},
]


@pytest.fixture(scope="module")
def llm():
    with LLM("embedded", engine__num_blocks=400) as llm:
        yield llm


@pytest.fixture(scope="module")
def want(llm: LLM) -> str:
    return text_of(llm, PROMPT)


def text_of(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> str:
    (answer,) = llm.generate(prompt, params, progress=False)
    return answer.text


@pytest.mark.parametrize(("params", "body"), REFUSED)
def test_what_the_api_refuses_is_refused_by_the_same_name(
    llm: LLM, want: str, params: dict[str, Any], body: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as refused:
        text_of(llm, PROMPT, replace(GREEDY, **params))
    assert asyncio.run(field_of_the_api(llm, body)) == refused.value.field
    assert text_of(llm, PROMPT) == want


async def field_of_the_api(llm: LLM, body: dict[str, Any]) -> str:
    api = Api(FakeGenerator(), api_settings(llm.config, llm.card), tokenizer=llm.tokenizer)  # type: ignore[arg-type]
    whole = {"model": llm.card.name, "prompt": PROMPT, "max_tokens": 6, **body}
    answer = await api.post(COMPLETIONS, whole)
    assert answer.status_code == 400, answer.text
    await api.http.aclose()
    return answer.json()["error"]["param"]


@pytest.mark.parametrize("params", REFUSED_HERE)
def test_what_a_client_cannot_even_say_is_refused_too(llm: LLM, want: str, params: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        text_of(llm, PROMPT, replace(GREEDY, **params))
    assert text_of(llm, PROMPT) == want


@pytest.mark.parametrize(
    "prompt", [[1, FAR], [-1], [], [1.5], [True], ["a", 5], None, [2**70], [5] * 3000, "x " * 20_000]
)
def test_a_prompt_that_is_none_is_refused(llm: LLM, want: str, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate([PROMPT, prompt], GREEDY, progress=False)
    assert text_of(llm, PROMPT) == want


@pytest.mark.parametrize("stop", [[""], [5], ["x"] * 65, "y" * 2000])
def test_stop_strings_are_the_apis(llm: LLM, want: str, stop: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(PROMPT, GREEDY, stop=stop, progress=False)
    assert text_of(llm, PROMPT) == want


def test_a_model_that_embeds_does_not_generate(tmp_path: Path) -> None:
    checkpoint(tmp_path, "lasttoken", normalise=True)
    with (
        LLM(str(tmp_path / "model"), engine__num_blocks=400) as llm,
        pytest.raises(RequestError) as refused,
    ):
        text_of(llm, PROMPT)
    assert refused.value.field == "model"


def test_integers_of_other_libraries_are_integers(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    assert text_of(llm, np.array(ids)) == text_of(llm, [ids]) == text_of(llm, [np.array(ids)])


def test_a_seed_is_one_also_when_it_is_zero_and_without_one_answers_differ(llm: LLM) -> None:
    def answers(seed: int | None) -> list[str]:
        params = SamplingParams(temperature=1.5, max_tokens=12, seed=seed)
        return [answer.text for answer in llm.generate([PROMPT] * 4, params, progress=False)]

    for seed in (0, 7):
        assert len({*answers(seed), *answers(seed)}) == 1, (
            "each prompt has the request's own seed, as in the API"
        )
    assert answers(0) != answers(7)
    assert answers(-1) == answers(2**63 - 1), "as the API takes it"
    assert len({*answers(None), *answers(None)}) == 8


def test_an_answer_without_parameters_is_sampled_as_the_models_makers_say(tmp_path: Path) -> None:
    folder = shutil.copytree(resolve("embedded"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    with LLM(str(folder), engine__num_blocks=400) as careful:
        first, second = careful.generate([PROMPT] * 2, progress=False)
    assert first.text == second.text
    assert len(first.token_ids) <= 64


CHATS: list[tuple[list[dict[str, Any]], Callable[[list[dict[str, Any]]], list[dict[str, Any]]]]] = [
    (
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        lambda chat: [{"role": "system", "content": "Be brief."}, *chat[1:]],
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        lambda _: [{"role": "user", "content": "Hi"}],
    ),
]


@pytest.mark.parametrize(("chat", "plain"), CHATS)
def test_chats_are_the_apis(llm: LLM, chat: list[dict[str, Any]], plain: Any) -> None:
    assert llm.chat(chat, GREEDY).text == llm.chat(plain(chat), GREEDY).text


@pytest.mark.parametrize(
    "messages",
    [[], "text", [5], [{"role": "user"}], [{"role": "cat", "content": "x"}], [{"content": "x"}],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]],
)  # fmt: skip
def test_messages_that_the_api_refuses_are_refused(llm: LLM, want: str, messages: Any) -> None:
    with pytest.raises(RequestError) as refused:
        llm.chat(messages, GREEDY)
    assert refused.value.field == "messages"
    assert text_of(llm, PROMPT) == want


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("keys", [{}, {"decode__tp": 2}], ids=["one rank", "two ranks"])
def test_an_engine_that_dies_is_replaced(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("embedded", engine__num_blocks=400, **keys) as llm:
        want, steps, commit = text_of(llm, PROMPT), count(), StepScheduler.commit

        def fails_once(scheduler: StepScheduler, *of_step: Any) -> Any:
            if next(steps) == 1:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return commit(scheduler, *of_step)

        monkeypatch.setattr(StepScheduler, "commit", fails_once)
        assert text_of(llm, PROMPT) == want, "the request goes on with the next instance"
        assert text_of(llm, PROMPT) == want


def test_a_rank_that_is_killed_costs_no_answer() -> None:
    with LLM("embedded", engine__num_blocks=400, decode__tp=2) as llm:
        want = text_of(llm, PROMPT)
        for rank in children("engine.ranks.rank_process")[:1]:
            rank.kill()
        assert text_of(llm, PROMPT) == want


def test_one_whose_instances_all_fail_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("cluster.instance.kept_instances.MAX_PAUSE_S", 0.01)
    monkeypatch.setattr("cluster.ingress.delivery.running_attempt.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("cluster.scheduler.queue.admission.BEGUN_WAIT_S", 1.0)
    with LLM("embedded", engine__num_blocks=400) as llm:
        monkeypatch.setattr(StepScheduler, "commit", fails)
        for _ in range(3):
            with pytest.raises(ReplicaLost) as lost:
                text_of(llm, PROMPT)
        assert "RuntimeError: the device is gone" in str(lost.value)
        assert str(lost.value).endswith("Close this LLM and make another one")
