"""Ollama's own clients and LangChain's ChatOllama, unchanged: a script plays the model."""

import contextlib
import json
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.ingress.bodies.body_model import Strict
from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.ollama.ollama_options import OllamaOptions
from cluster.ingress.ollama.ollama_requests import OllamaChat, OllamaGenerate
from cluster.ingress.ollama.ollama_vectors import OllamaEmbed
from models.files.hub import resolve
from models.pooling.pooling import Pooling
from tests.clients.run_client import install_npm, install_python, said
from tests.clients.test_clients import CALL, EXPECTED
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import HERMES, ScriptedGenerator, TemplateTokenizer
from tests.cluster.ingress.images.test_images import SMALL, seeing
from tests.cluster.ingress.openai.test_embeddings import VectorGenerator
from tests.models.pulling.fake_places import WEIGHTS, FakePlaces
from tests.models.seeing_checkpoints import encoded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SCRIPTS = Path(__file__).parent
NOT_THERE = "404 the model 'llama3' does not exist; this server has 'fake'"
SHOWN = "['completion', 'tools', 'thinking'] ['pulling manifest', 'success']"
OF_PYTHON = [
    *(*EXPECTED[:2], EXPECTED[2], EXPECTED[2]),
    *("{'a': 1}", "length", "Hm. Yes. True True", "True", "ok", "[4, 4] 4"),
    *(NOT_THERE, "['fake:latest'] ['fake:latest']", SHOWN),
]
BODIES: dict[str, type[Strict]] = {
    "ChatRequest": OllamaChat,
    "GenerateRequest": OllamaGenerate,
    "EmbedRequest": OllamaEmbed,
    "Options": OllamaOptions,
}
"""By the client's name."""
OF_NODE = [*EXPECTED, "1", "Hm. Yes.", "ok", "[ 4, 4 ]", NOT_THERE, "fake:latest 1"]
OF_LANGCHAIN = [*EXPECTED, "{'a': 1}", "Hm. Yes. True", "[4, 4]"]


def script(rendered: dict[str, Any]) -> str:
    """Call the tool once, where there is one, and then say what it gave; think and write JSON when asked to."""
    told = [message["content"] for message in rendered["messages"] if message["role"] == "tool"]
    match rendered["messages"][-1]["content"]:
        case "json":
            return '{"a": 1}'
        case "think":
            return "<think>Hm.</think>Yes."
        case _ if rendered["tools"] and not told:
            return f"<tool_call>\n{CALL}\n</tool_call>"
        case _:
            return f"So {told[-1]}." if told else "Hello there."


def known(body: type[Strict]) -> set[str]:
    return {*body.model_fields, *body.neutral, *body.noted}


@contextlib.asynccontextmanager
async def served(api: Api) -> AsyncIterator[str]:
    server = HttpServer(api.app, "127.0.0.1", [0], shared=False)
    server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop()


@pytest.fixture
async def urls() -> AsyncIterator[list[str]]:
    """Servers that talk, embed and see."""
    tokenizer = TemplateTokenizer(f"{HERMES} enable_thinking <think></think>", ["<think>", "</think>"])
    settings = replace(
        SETTINGS, max_context_tokens=100_000, vocab_size=4096, tokenizer_folder=resolve("embedded")
    )
    talks = Api(ScriptedGenerator(tokenizer, script), settings, tokenizer=tokenizer)
    embeds = Api(VectorGenerator(), replace(SETTINGS, pooling=Pooling(kind="last"), embedding_size=4))
    async with served(talks) as first, served(embeds) as second, served(seeing()) as third:
        yield [first, second, third]


@pytest.fixture
def image(tmp_path: Path) -> str:
    (file := tmp_path / "image.png").write_bytes(encoded(SMALL))
    return str(file)


async def said_by(script: str, urls: list[str], image: str, folder: Path) -> list[str]:
    install_python("ollama", target := folder / "packages")
    return await said([sys.executable, str(SCRIPTS / script), *urls, image], folder, PYTHONPATH=str(target))


async def test_ollamas_python_client_finds_what_it_expects(
    urls: list[str], image: str, tmp_path: Path
) -> None:
    *found, fields = await said_by("ollama_client.py", urls, image, tmp_path)
    assert found == OF_PYTHON
    unknown = {kind: {*names} - known(BODIES[kind]) for kind, names in json.loads(fields).items()}
    assert {kind: names for kind, names in unknown.items() if names} == {}, "they would be left out"


async def test_ollamas_python_client_pulls_and_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_python("ollama", target := tmp_path / "packages")
    with FakePlaces().running() as places:
        monkeypatch.setenv("HF_ENDPOINT", places.url)
        monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
        async with served(Api(FakeGenerator())) as url:
            command = [sys.executable, str(SCRIPTS / "ollama_pull_client.py"), url, "hf.co/org/name:latest"]
            found = await said(command, tmp_path, PYTHONPATH=str(target))
        digest, size = places.sha256("model.safetensors"), len(WEIGHTS)
    assert found == [
        "['pulling manifest', 'verifying sha256 digest', 'writing manifest', 'success']",
        str({f"sha256:{digest}": (size, size)}),
        "success success",
        "404 there is no pulled model 'org/none",
        "400 cannot get org/none from the hub: ",
    ]


async def test_chat_ollama_finds_what_it_expects(urls: list[str], image: str, tmp_path: Path) -> None:
    assert await said_by("ollama_langchain_client.py", urls, image, tmp_path) == OF_LANGCHAIN


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
async def test_the_node_client_finds_what_it_expects(urls: list[str], image: str, tmp_path: Path) -> None:
    shutil.copy(SCRIPTS / "ollama_client.mjs", tmp_path)
    install_npm("ollama", tmp_path)
    assert await said(["node", "ollama_client.mjs", *urls, image], tmp_path) == OF_NODE
