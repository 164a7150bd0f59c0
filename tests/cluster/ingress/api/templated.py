"""Chats over the embedded model's tokenizer with any chat template."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.ingress.bodies.body_model import validate
from cluster.ingress.generation.chat_format import ChatFormat
from cluster.ingress.openai.openai_requests import conversation_of, generation_of
from cluster.ingress.openai.request_bodies import ChatRequest
from cluster.ingress.requests.conversation import ChatConversation
from cluster.ingress.requests.generation_request import GenerationRequest
from models.text.tokenizer import Tokenizer, load_tokenizer
from tests.cluster.ingress.api.harness import SETTINGS

EMBEDDED = Path(__file__).parents[4] / "models" / "embedded"
ASK = {"role": "user", "content": "Which shade?"}
SYSTEM = {"role": "system", "content": "Be brief."}
PARAMETERS = {"type": "object", "properties": {"shade": {"type": "string"}, "count": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": PARAMETERS}}


def call(call_id: str, arguments: str = '{"shade": "blue", "count": 2}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "paint", "arguments": arguments}}


def calling(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def tokenizer_with(template: str | Mapping[str, str], folder: Path) -> Tokenizer:
    """Several templates stand in tokenizer_config.json under their names, one in chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    path = folder / "tokenizer_config.json"
    settings = {key: value for key, value in json.loads(path.read_text()).items() if key != "chat_template"}
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template)
    else:
        settings["chat_template"] = [{"name": name, "template": source} for name, source in template.items()]
    path.write_text(json.dumps(settings))
    return load_tokenizer(folder)


def chat_asked(body: dict[str, Any]) -> tuple[ChatConversation, GenerationRequest]:
    chat = validate(ChatRequest, body)
    return conversation_of(chat), generation_of(chat)


class Chat:
    def __init__(self, tokenizer: Tokenizer, **settings: Any) -> None:
        self.tokenizer = tokenizer
        sizes = {"vocab_size": tokenizer.vocab_size, "max_context_tokens": 1 << 14}
        self.format = ChatFormat(tokenizer, replace(SETTINGS, **sizes, **settings))

    @property
    def formats(self) -> tuple[str, str]:
        return self.format.formats.tools, self.format.formats.reasoning

    def prompt(self, *messages: Mapping[str, Any], **body: Any) -> str:
        conversation, _ = chat_asked({"model": "fake", "messages": list(messages), **body})
        return self.tokenizer.decode(self.format.prompt_of(conversation), skip_special_tokens=False)


def chat_with(template: str | Mapping[str, str], folder: Path, **settings: Any) -> Chat:
    return Chat(tokenizer_with(template, folder), **settings)
