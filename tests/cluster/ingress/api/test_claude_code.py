"""Claude Code, from npm, runs one of its tools through /v1/messages; the model's part is played by a script."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.ingress.api.http_server import HttpServer
from core.types import Request
from tests.clients.run_client import install, said
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import HERMES, TemplateTokenizer, TokenGenerator, last_rendered

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]
VERSION = "2.1.197"
SECRET = "the word is heliotrope"


@pytest.fixture(scope="module")
def claude(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npm")
    install(["npm", "install", "--no-audit", "--no-fund", f"@anthropic-ai/claude-code@{VERSION}"], folder)
    return folder / "node_modules" / ".bin" / "claude"


class Scripted(TokenGenerator):
    """Calls Read once, and then says what it was told."""

    def __init__(self, tokenizer: TemplateTokenizer, path: Path) -> None:
        super().__init__("", tokenizer)
        call = {"name": "Read", "arguments": {"file_path": str(path)}}
        self._call = f"I will read it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
        self._tokenizer = tokenizer

    async def generate(self, request: Request, shared: object = None):
        told = [m for m in self._tokenizer.rendered[-1]["messages"] if m["role"] == "tool"]
        text = "heliotrope it is" if told and SECRET in told[-1]["content"] else self._call
        self.ids = self._tokenizer.encode(text)
        stream = super().generate(request)
        try:
            async for token in stream:
                yield token
        finally:
            await stream.aclose()


async def test_a_tool_round_trip(claude: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text(SECRET)
    tokenizer = TemplateTokenizer(HERMES)
    settings = replace(SETTINGS, max_context_tokens=1_000_000, vocab_size=400, default_sampling={})
    api = Api(Scripted(tokenizer, tmp_path / "note.txt"), settings, tokenizer=tokenizer)
    server = HttpServer(api.app, "127.0.0.1", [0], shared=False)
    server.start()
    try:
        lines = await said(
            [str(claude), "-p", "What is the word?"],
            tmp_path,
            without=("ANTHROPIC", "CLAUDE"),
            HOME=str(tmp_path),
            ANTHROPIC_BASE_URL=f"http://127.0.0.1:{server.port}",
            ANTHROPIC_AUTH_TOKEN="k",
            ANTHROPIC_MODEL=NAME,
            ANTHROPIC_SMALL_FAST_MODEL=NAME,
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
    finally:
        await server.stop()
    assert "heliotrope it is" in "\n".join(lines), lines
    rendered: Any = last_rendered(api)
    assert "Read" in {tool["function"]["name"] for tool in rendered["tools"]}
