"""Frameworks that people build with, each in its own folder: an answer, a stream and a tool's round trip; a script plays the model."""

import json
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.ingress.http.http_server import HttpServer
from models.files.hub import resolve
from tests.clients.run_client import install_npm, install_python, said
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import HERMES, ScriptedGenerator, TemplateTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.turns(5)]
SCRIPTS = Path(__file__).parent
PACKAGES = {
    "langchain_client.py": "langchain",
    "llama_index_client.py": "llama-index",
    "litellm_client.py": "litellm",
    "pydantic_ai_client.py": "pydantic-ai",
    "openai_agents_client.py": "openai-agents",
}
NODE_PACKAGES = {
    # (packages, how often all of it is found, once for each of the script's ways to the model)
    "node_client.mjs": ("openai", 1),
    "ai_client.mjs": ("ai", 4),
}
CALL = json.dumps({"name": "look_up", "arguments": {"word": "heliotrope"}})
EXPECTED = ["Hello there.", "Hello there.", "So heliotrope is a flower."]


def script(rendered: dict[str, Any]) -> str:
    """Call the tool once, where there is one, and then say what it gave."""
    told = [message["content"] for message in rendered["messages"] if message["role"] == "tool"]
    if rendered["tools"] and not told:
        return f"<tool_call>\n{CALL}\n</tool_call>"
    return f"So {told[-1]}." if told else "Hello there."


@pytest.fixture
async def url() -> AsyncIterator[str]:
    tokenizer = TemplateTokenizer(HERMES)
    settings = replace(
        SETTINGS,
        max_context_tokens=100_000,
        vocab_size=4096,
        default_sampling={},
        tokenizer_folder=resolve("embedded"),  # for the grammars of strict tools
    )
    api = Api(ScriptedGenerator(tokenizer, script), settings, tokenizer=tokenizer)
    server = HttpServer(api.app, "127.0.0.1", [0], shared=False)
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}/v1"
    finally:
        await server.stop()


@pytest.mark.parametrize("script", PACKAGES)
async def test_a_framework_finds_what_it_expects(script: str, url: str, tmp_path: Path) -> None:
    install_python(PACKAGES[script], target := tmp_path / "packages")
    found = await said([sys.executable, str(SCRIPTS / script), url], tmp_path, PYTHONPATH=str(target))
    assert found == EXPECTED


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
@pytest.mark.parametrize("script", NODE_PACKAGES)
async def test_a_node_sdk_finds_what_it_expects(script: str, url: str, tmp_path: Path) -> None:
    packages, num_ways = NODE_PACKAGES[script]
    shutil.copy(SCRIPTS / script, tmp_path)
    install_npm(packages, tmp_path)
    assert await said(["node", script, url], tmp_path) == EXPECTED * num_ways
