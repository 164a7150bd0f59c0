"""A served model that plays an agent's part by a script: it reads a file with the client's own tool, and says what it was told."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from cluster.ingress.api.http_server import HttpServer
from core.types import Request
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import HERMES, TemplateTokenizer, TokenGenerator

SECRET = "the word is heliotrope"
SAID = "heliotrope it is"


class Scripted(TokenGenerator):
    """Calls its tool once, and then says what it was told."""

    def __init__(self, tokenizer: TemplateTokenizer, tool: str, arguments: dict[str, Any]) -> None:
        super().__init__("", tokenizer)
        call = {"name": tool, "arguments": arguments}
        self._call = f"I will read it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        self._tokenizer = tokenizer

    async def generate(self, request: Request, shared: object = None):
        told = [m for m in self._tokenizer.rendered[-1]["messages"] if m["role"] == "tool"]
        text = SAID if told and SECRET in told[-1]["content"] else self._call
        self.ids = self._tokenizer.encode(text)
        stream = super().generate(request)
        try:
            async for token in stream:
                yield token
        finally:
            await stream.aclose()


@asynccontextmanager
async def served_agent(tool: str, arguments: dict[str, Any]) -> AsyncGenerator[tuple[Api, str]]:
    """Serve the script, and yield it with its address."""
    tokenizer = TemplateTokenizer(HERMES)
    settings = replace(SETTINGS, max_context_tokens=1_000_000, vocab_size=400, default_sampling={})
    api = Api(Scripted(tokenizer, tool, arguments), settings, tokenizer=tokenizer)
    server = HttpServer(api.app, "127.0.0.1", [0], shared=False)
    server.start()
    try:
        yield api, f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop()
