"""Every parameter that the openai package knows is honoured or refused by name."""

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel

from cluster.ingress.api.openai_requests import NEUTRAL, ChatRequest, CompletionRequest, validate
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
