"""A served model that plays an agent's part by a script: it reads a file with the client's own tool, and says what it was told."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from cluster.ingress.http.http_server import HttpServer
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import HERMES, ScriptedGenerator, TemplateTokenizer

SECRET = "the word is heliotrope"
SAID = "heliotrope it is"


def script(tool: str, arguments: dict[str, Any]) -> Callable[[dict[str, Any]], str]:
    """Call the tool until its result has the secret, and then say that."""
    call = json.dumps({"name": tool, "arguments": arguments})

    def answer(rendered: dict[str, Any]) -> str:
        told = [message for message in rendered["messages"] if message["role"] == "tool"]
        is_told = told and SECRET in told[-1]["content"]
        return SAID if is_told else f"I will read it.\n<tool_call>\n{call}\n</tool_call>"

    return answer


@asynccontextmanager
async def served_agent(tool: str, arguments: dict[str, Any]) -> AsyncGenerator[tuple[Api, str]]:
    """Serve the script, and yield it with its address."""
    tokenizer = TemplateTokenizer(HERMES)
    settings = replace(SETTINGS, max_context_tokens=1_000_000, vocab_size=400, default_sampling={})
    api = Api(ScriptedGenerator(tokenizer, script(tool, arguments)), settings, tokenizer=tokenizer)
    server = HttpServer(api.app, "127.0.0.1", [0], shared=False)
    server.start()
    try:
        yield api, f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop()
