"""Every effort is taken for every model: its template's nearest one, and the answer says which."""

from typing import Any

import pytest

from cluster.ingress.templates.reasoning_effort import EFFORTS, ReasoningEfforts
from core.errors import RequestError
from tests.cluster.ingress.api.fakes import NAME, ByteTokenizer
from tests.cluster.ingress.api.template_fakes import ASK, last_rendered, served

GPT_OSS = "{{ reasoning_effort|default('medium') }} {{ message.thinking }}"
CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TEMPLATES: dict[str, tuple[str, dict[str, str]]] = {
    # (template, what it is given for none, minimal, low, medium, high, xhigh, max)
    "levels": (
        GPT_OSS,
        dict(zip(EFFORTS, ["low", "low", "low", "medium", "high", "high", "high"], strict=True)),
    ),
    "two levels": (
        "{% if reasoning_effort not in ['none', 'high'] %}",
        dict(zip(EFFORTS, ["none", "none", "high", "high", "high", "high", "high"], strict=True)),
    ),
    "a switch": (
        "{{ enable_thinking }} <think></think>",
        dict(zip(EFFORTS, ["none", "none", "medium", "medium", "medium", "medium", "medium"], strict=True)),
    ),
    "levels and a switch": (
        "{{ enable_thinking }} {{ reasoning_effort }} <think></think>",
        dict(zip(EFFORTS, ["none", "low", "low", "medium", "high", "high", "high"], strict=True)),
    ),
    "neither": ("<think></think>", dict.fromkeys(EFFORTS, "default")),
    "no reasoning": ("", dict.fromkeys(EFFORTS, "default")),
}


def body(path: str, effort: str) -> dict[str, Any]:
    match path:
        case "/v1/messages":
            return {"model": NAME, "messages": ASK, "max_tokens": 20, "output_config": {"effort": effort}}
        case "/v1/responses":
            return {"model": NAME, "input": ASK, "reasoning": {"effort": effort}}
        case _:
            return {"model": NAME, "messages": ASK, "reasoning_effort": effort}


@pytest.mark.parametrize("path", [CHATS, MESSAGES, RESPONSES])
@pytest.mark.parametrize("template", TEMPLATES)
async def test_the_answer_says_which_effort_was_taken(path: str, template: str) -> None:
    text, taken = TEMPLATES[template]
    api = served("Yes.", text, ["<think>", "</think>"], "<think></think>")
    for effort in EFFORTS:
        if path == MESSAGES and effort in ("none", "minimal"):
            continue
        answer = await api.post(path, body(path, effort))
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-baton-reasoning-effort"] == taken[effort]
        own = {"no reasoning": "none", "neither": "medium"}.get(template, taken[effort])
        assert (effort != own) == ("x-baton-warning" in answer.headers), effort


async def test_the_template_is_given_its_own_words() -> None:
    api = served("Yes.", GPT_OSS)
    await api.post(CHATS, body(CHATS, "max"))
    assert last_rendered(api)["reasoning_effort"] == "high"
    api = served("Yes.", "{{ enable_thinking }}")
    for effort, on in (("none", False), ("max", True)):
        await api.post(CHATS, body(CHATS, effort))
        assert last_rendered(api)["enable_thinking"] is on


async def test_a_responses_own_field_says_it_too() -> None:
    answer = await served("Yes.", GPT_OSS).post(RESPONSES, body(RESPONSES, "xhigh"))
    assert answer.json()["reasoning"]["effort"] == "high"


async def test_a_request_without_an_effort_says_nothing_of_one() -> None:
    answer = await served("Yes.", GPT_OSS).post(CHATS, {"model": NAME, "messages": ASK})
    assert "x-baton-reasoning-effort" not in answer.headers


class _Thinker(ByteTokenizer):
    """Renders as DeepSeek-V3.1's template does, which reads `thinking`, and refuses an effort that it does not know."""

    template = "{% if thinking %}<think>{% else %}</think>{% endif %} {{ reasoning_effort }}"

    def render_chat(self, messages: Any, *_: Any, **arguments: Any) -> str:
        if "reasoning_effort" in arguments:
            raise RequestError("no such effort")
        return "<think>" if arguments.get("thinking") else "</think>"


def test_a_template_is_asked_what_it_takes() -> None:
    efforts = ReasoningEfforts(_Thinker(), reasons=True)
    assert efforts.of("high").arguments == {"thinking": True}
    assert efforts.of("none").arguments == {"thinking": False}
