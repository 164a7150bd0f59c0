"""A tokenizer with a chat template and special tokens, and a generator that writes what a model of a family would."""

import json
from collections.abc import Callable, Mapping, Sequence
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


def _json_call(function: Mapping[str, Any]) -> str:
    return json.dumps({"name": function["name"], "arguments": function["arguments"]})


SIGNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "<|channel|>": lambda f: (
        f"<|start|>assistant<|channel|>commentary to=functions.{f['name']} json<|message|>"
        f"{json.dumps(f['arguments'])}<|call|>"
    ),
    "[TOOL_CALLS]": lambda f: f"[TOOL_CALLS] [{_json_call(f)}]",
    "<tool_call>": lambda f: f"<tool_call>\n{_json_call(f)}\n</tool_call>",
}
"""What a template has in it, and how it writes a call then."""


class TemplateTokenizer(ByteTokenizer):
    """Renders a conversation as JSON, with calls and reasoning in the markup that its template has a sign of. Special tokens are
    single ids from 300 on."""

    def __init__(self, template: str, special: Sequence[str] = (), ending: str = "") -> None:
        super().__init__()
        self.template, self._ending = template, ending
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
        shows = tools and any(sign in self.template for sign in SIGNS)
        shown = " ".join(tool["function"]["name"] for tool in tools) if shows else ""
        return shown + "".join(self._said(message) for message in messages) + self._ending

    def _said(self, message: Mapping[str, Any]) -> str:
        """One message."""
        rest, thought = dict(message), ""
        if "</think>" in self.template and "reasoning_content" in rest:
            thought = f"<think>{rest.pop('reasoning_content')}</think>"
        sign = next((sign for sign in SIGNS if sign in self.template), "")
        calls = [call["function"] for call in rest.pop("tool_calls", ())] if sign else []
        return (
            thought + json.dumps(rest) + "".join(map(SIGNS[sign], calls))
            if calls
            else thought + json.dumps(rest)
        )


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


class ScriptedGenerator(TokenGenerator):
    """Says what a script makes of the conversation that the template was given last."""

    def __init__(self, tokenizer: TemplateTokenizer, script: Callable[[dict[str, Any]], str]) -> None:
        super().__init__("", tokenizer)
        self._tokenizer, self._script = tokenizer, script

    async def generate(self, request: Any, shared: object = None):
        self.ids = self._tokenizer.encode(self._script(self._tokenizer.rendered[-1]))
        stream = super().generate(request)
        try:
            async for token in stream:
                yield token
        finally:
            await stream.aclose()


def served(text: str, template: str = HERMES, special: Sequence[str] = (), ending: str = "") -> Api:
    tokenizer = TemplateTokenizer(template, special, ending)
    settings = replace(SETTINGS, max_context_tokens=4000, vocab_size=400)
    return Api(TokenGenerator(text, tokenizer), settings, tokenizer=tokenizer)


def last_rendered(api: Api) -> dict[str, Any]:
    assert isinstance(api.tokenizer, TemplateTokenizer)
    return api.tokenizer.rendered[-1]
