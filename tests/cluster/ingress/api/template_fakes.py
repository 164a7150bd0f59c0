"""A tokenizer with a chat template and special tokens, and a generator that writes what a model of a family would."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.errors import RequestError
from tests.cluster.ingress.api.fakes import END, ByteTokenizer, FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.parsers.recorded_texts import WEATHER

FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}
TOOLS: list[Any] = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "get_time"}},
]
ASK: list[Any] = [{"role": "user", "content": "Weather in Zürich?"}]
HERMES = "{{ tools }} <tool_call></tool_call>"


class TemplateTokenizer(ByteTokenizer):
    """Renders a conversation as JSON, with what the template was given beside it. Special tokens are single ids from 300 on."""

    def __init__(self, template: str, special: Sequence[str] = (), ending: str = "") -> None:
        super().__init__()
        self.template, self._ending = template + "{% if tools %}", ending
        self.special_tokens = {"<end>": END, **{text: 300 + i for i, text in enumerate(special)}}
        self.rendered: list[dict[str, Any]] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = list[int]()
        while text:
            found = next((s for s in self.special_tokens if text.startswith(s)), None)
            ids += [self.special_tokens[found]] if found else list(text[0].encode())
            text = text[len(found or text[0]) :]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        names = {token: text for text, token in self.special_tokens.items()}
        out, run = "", b""
        for token in ids:
            if token < 256:
                run += bytes([token])
                continue
            out, run = out + run.decode(errors="replace"), b""
            out += "" if skip_special_tokens else names[token]
        return out + run.decode(errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        self.rendered.append({"messages": list(messages), "tools": tools, **arguments})
        for message in messages:
            for call in message.get("tool_calls", ()):
                wanted = "concatenates" in self.template
                if wanted and not (
                    isinstance(call["function"]["arguments"], str) and message["content"] == ""
                ):
                    raise RequestError("can only concatenate str", field="messages")
        return json.dumps(list(messages)) + self._ending


class TokenGenerator(FakeGenerator):
    """Emits special tokens as the single ids that they are."""

    def __init__(self, text: str, tokenizer: TemplateTokenizer) -> None:
        super().__init__()
        self.ids = tokenizer.encode(text)

    async def generate(self, request: Any, shared: object = None):
        self.text = "x" * len(self.ids)
        stream = super().generate(request)
        try:
            async for token in stream:
                at = token.index
                yield replace(token, token=self.ids[at]) if at < len(self.ids) else token
        finally:
            await stream.aclose()


def served(text: str, template: str = HERMES, special: Sequence[str] = (), ending: str = "") -> Api:
    tokenizer = TemplateTokenizer(template, special, ending)
    settings = replace(SETTINGS, max_context_tokens=4000, vocab_size=400)
    return Api(TokenGenerator(text, tokenizer), settings, tokenizer=tokenizer)


def last_rendered(api: Api) -> dict[str, Any]:
    assert isinstance(api.tokenizer, TemplateTokenizer)
    return api.tokenizer.rendered[-1]
