"""Checkpoints with several chat templates are served by the one that a request needs."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cluster.ingress.parsers.model_formats import ModelFormats
from core.errors import RequestError
from models.text.tokenizer import load_tokenizer
from tests.cluster.ingress.api.templated import ASK, SYSTEM, TOOL, Chat, call, calling, result, tokenizer_with

DEFAULT = """{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
TOOL_USE = """<tools>{{ tools | tojson }}</tools>{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
TEMPLATES = {"default": DEFAULT, "tool_use": TOOL_USE, "rag": "{{ documents }}"}
LOOP = (ASK, calling(call("call_a")), result("call_a", "seen"))
LOOP_AS_RENDERED = [
    ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {**call("call_a"), "function": {"name": "paint", "arguments": {"shade": "blue", "count": 2}}}
        ],
    },
    result("call_a", "seen"),
]


@pytest.fixture(params=["list", "dict", "files"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tokenizer_with(TEMPLATES, tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(path.read_text())
    if request.param == "dict":
        settings["chat_template"] = TEMPLATES
    if request.param == "files":
        del settings["chat_template"]
        (tmp_path / "chat_template.jinja").write_text(DEFAULT)
        more = tmp_path / "additional_chat_templates"
        more.mkdir()
        (more / "tool_use.jinja").write_text(TOOL_USE)
    path.write_text(json.dumps(settings))
    return tmp_path


def test_each_turn_of_a_tool_loop_is_rendered_by_the_template_for_tools(folder: Path) -> None:
    chat, theirs = Chat(load_tokenizer(folder)), AutoTokenizer.from_pretrained(str(folder))
    assert chat.format.formats == ModelFormats("hermes", "none")
    for messages, rendered in (((ASK,), [ASK]), (LOOP, LOOP_AS_RENDERED)):
        said = theirs.apply_chat_template(rendered, tools=[TOOL], tokenize=False, add_generation_prompt=True)
        assert chat.prompt(*messages, tools=[TOOL]) == said
        assert said.startswith("<tools>")


def test_a_plain_chat_is_rendered_by_the_default_template(folder: Path) -> None:
    assert (
        Chat(load_tokenizer(folder)).prompt(SYSTEM, ASK) == "<system>Be brief.<user>Which shade?<assistant>"
    )


def test_earlier_calls_are_not_lost_where_a_request_has_no_tools(folder: Path) -> None:
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        prompt = Chat(load_tokenizer(folder)).prompt(*LOOP, **more)
        assert '<tool_call>{"name": "paint"' in prompt or '"name": "paint"}' in prompt
        assert prompt.endswith("<tool>seen<assistant>")
        assert "Paints." not in prompt


def test_without_a_template_for_tools_earlier_calls_are_refused(tmp_path: Path) -> None:
    chat = Chat(tokenizer_with({"default": DEFAULT, "rag": "{{ documents }}"}, tmp_path))
    with pytest.raises(RequestError, match="renders no tool calls"):
        chat.prompt(*LOOP)


def test_a_client_cannot_choose_a_template(folder: Path) -> None:
    with pytest.raises(RequestError, match="'template_name' cannot be set there"):
        Chat(load_tokenizer(folder)).prompt(ASK, chat_template_kwargs={"template_name": "rag"})
