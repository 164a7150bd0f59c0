"""Every parameter that the openai and anthropic packages know is honoured or refused by name."""

from typing import Any, get_type_hints

import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types import completion_create_params as completion_params
from openai.types.batch_create_params import BatchCreateParams
from openai.types.chat import completion_create_params as chat_params
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel

from cluster.ingress.anthropic.anthropic_requests import MESSAGES_NEUTRAL, MessagesRequest
from cluster.ingress.batches.batch_routes import BATCH_NEUTRAL, BatchRequest
from cluster.ingress.bodies.body_model import validate
from cluster.ingress.bodies.neutral_fields import NEUTRAL
from cluster.ingress.openai.request_bodies import ChatRequest, CompletionRequest, EmbeddingRequest
from cluster.ingress.responses.responses_requests import RESPONSES_NEUTRAL, ResponsesRequest
from core.errors import RequestError


def parameters(module: Any) -> set[str]:
    base = next(value for name, value in vars(module).items() if name == "CompletionCreateParamsBase")
    return set(get_type_hints(base)) | {"stream"}


@pytest.mark.parametrize(
    ("module", "model"), [(chat_params, ChatRequest), (completion_params, CompletionRequest)]
)
def test_each_is_known(module: Any, model: type[BaseModel]) -> None:
    unknown = parameters(module) - set(model.model_fields) - set(NEUTRAL)
    assert not unknown


@pytest.mark.parametrize(
    ("parameters", "model", "neutral"),
    [
        (EmbeddingCreateParams, EmbeddingRequest, NEUTRAL),
        (BatchCreateParams, BatchRequest, BATCH_NEUTRAL),
        (ResponseCreateParamsBase, ResponsesRequest, RESPONSES_NEUTRAL),
        (MessageCreateParamsBase, MessagesRequest, MESSAGES_NEUTRAL),
    ],
)
def test_each_of_the_other_routes_is_known(
    parameters: Any, model: type[BaseModel], neutral: dict[str, Any]
) -> None:
    unknown = set(get_type_hints(parameters)) - set(model.model_fields) - set(neutral)
    assert not unknown


def test_a_value_that_matters_is_refused_and_a_neutral_one_is_not() -> None:
    body = {"model": "m", "prompt": "x"}
    validate(CompletionRequest, {**body, "suffix": None, "user": "me"})
    for name in set(NEUTRAL) - {
        "user",
        "safety_identifier",
        "metadata",
        "prompt_cache_key",
        "parallel_tool_calls",
    }:
        with pytest.raises(RequestError) as refused:
            validate(CompletionRequest, {**body, name: object()})
        assert refused.value.field == name
