"""What Ollama's clients ask of models: names, lists, facts, and what they may not change."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from transformers import AutoModelForCausalLM

from cluster.ingress.tenants.access import Rules, TenantRules
from core.config.adapter_config import ServedAdapter
from models.files.hub import resolve
from models.pooling.pooling import Pooling
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import HERMES, served
from tests.cluster.ingress.ollama.ollama_answers import ASK, CHAT, refusal
from tests.cluster.ingress.openai.test_fill_in_middle import FAMILIES, Beginning

EMBEDDED = resolve("embedded")
NAMED = replace(
    SETTINGS,
    aliases=("org/qwen3:8b", "other"),
    adapters={"tuned": ServedAdapter("tuned@1", "/none")},
    tokenizer_folder=EMBEDDED,
)


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        (NAME, ""),
        (f"{NAME}:latest", ""),
        ("other", ""),
        ("org/qwen3:8b", ""),
        ("tuned", "tuned@1"),
        ("tuned:latest", "tuned@1"),
    ],
)
async def test_a_model_goes_by_its_names_with_and_without_the_tag(name: str, adapter: str) -> None:
    api = Api(FakeGenerator(), NAMED)
    answer = await api.post(CHAT, {"model": name, "messages": ASK, "stream": False})
    assert answer.json()["model"] == name
    assert api.generator.requests[-1].adapter == adapter


@pytest.mark.parametrize(
    "path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/pull"]
)
async def test_a_model_that_there_is_not_is_named(path: str) -> None:
    got = await Api(FakeGenerator()).post(path, {"model": "llama3:8b"})
    assert got.status_code == 404
    assert "the model 'llama3:8b' does not exist; this server has 'fake'" in got.json()["error"]


async def test_the_lists_have_each_name_with_a_tag_and_the_same_names() -> None:
    api = Api(FakeGenerator(), NAMED)
    listed = (await api.http.get("/api/tags")).json()["models"]
    assert [model["name"] for model in listed] == [
        "fake:latest",
        "org/qwen3:8b",
        "other:latest",
        "tuned:latest",
    ]
    assert [model["model"] for model in listed] == [model["name"] for model in listed]
    assert [model["details"]["parent_model"] for model in listed] == ["", "", "", NAME]
    running = (await api.http.get("/api/ps")).json()["models"]
    assert [model["name"] for model in running] == [model["name"] for model in listed]
    assert {model["context_length"] for model in running} == {200}
    assert {datetime.fromisoformat(model["expires_at"]) > datetime.now(UTC) for model in running} == {True}
    api.generator.ready_answer = (False, "no instance")
    assert (await api.http.get("/api/ps")).json() == {"models": []}


async def test_facts_of_the_files_are_those_of_the_checkpoint() -> None:
    listed = (await Api(FakeGenerator(), NAMED).http.get("/api/tags")).json()["models"]
    files = [*EMBEDDED.glob("*.safetensors")]
    assert {model["size"] for model in listed} == {sum(file.stat().st_size for file in files)}
    first, *_, tuned = (model["digest"] for model in listed)
    assert len(first) == len(tuned) == 64
    assert first != tuned
    details = listed[0]["details"]
    config = json.loads((EMBEDDED / "config.json").read_text())
    assert (details["format"], details["family"]) == ("safetensors", config["model_type"])
    parameters = AutoModelForCausalLM.from_pretrained(EMBEDDED).num_parameters()
    assert details["parameter_size"] == f"{parameters / 1e6:.1f}M"


async def test_packed_weights_have_no_number_of_parameters(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    listed = (
        await Api(FakeGenerator(), replace(SETTINGS, tokenizer_folder=tmp_path)).http.get("/api/tags")
    ).json()
    details = listed["models"][0]["details"]
    assert (details["parameter_size"], details["quantization_level"]) == ("", "FP8")


@pytest.mark.parametrize("field", ["model", "name"])
async def test_a_model_is_shown(field: str) -> None:
    settings = replace(NAMED, default_sampling={"temperature": 0.5, "repetition_penalty": 1.1})
    shown = (
        await Api(FakeGenerator(), settings).post("/api/show", {field: "fake:latest", "verbose": True})
    ).json()
    family = shown["details"]["family"]
    assert shown["model_info"]["general.architecture"] == family
    assert shown["model_info"][f"{family}.context_length"] == 200
    assert [line.split() for line in shown["parameters"].splitlines()] == [
        ["temperature", "0.5"],
        ["repeat_penalty", "1.1"],
    ]
    assert "'model' is required" in (await Api(FakeGenerator()).post("/api/show", {})).json()["error"]


async def capabilities(api: Api) -> list[str]:
    return (await api.post("/api/show", {"model": NAME})).json()["capabilities"]


async def test_what_a_model_can_do_is_shown() -> None:
    assert await capabilities(Api(FakeGenerator())) == ["completion"]
    thinks = served("x", HERMES + "<think></think> enable_thinking", ["<think>", "</think>"], "<think>\n")
    assert await capabilities(thinks) == ["completion", "tools", "thinking"]
    middle = Beginning(FAMILIES["Qwen2.5-Coder"][0])
    assert await capabilities(Api(FakeGenerator(), tokenizer=middle)) == ["completion", "insert"]
    embeds = replace(SETTINGS, pooling=Pooling(kind="last"), generates=False)
    assert await capabilities(Api(FakeGenerator(), embeds)) == ["embedding"]
    scores = replace(SETTINGS, pooling=Pooling(kind="cls", scores=True), generates=False)
    assert await capabilities(Api(FakeGenerator(), scores)) == []


async def test_the_version_is_of_numbers_alone() -> None:
    """Open WebUI sorts servers by it."""
    version = (await Api(FakeGenerator()).http.get("/api/version")).json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 12, 11], "the first release with logprobs"


async def test_what_is_served_is_pulled_at_once() -> None:
    api = Api(FakeGenerator())
    got = await api.post("/api/pull", {"model": f"{NAME}:latest"})
    assert got.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["status"] for line in got.text.splitlines()] == ["pulling manifest", "success"]
    assert (await api.post("/api/pull", {"name": NAME, "stream": False})).json() == {"status": "success"}
    assert "what can be pulled here is owner/name of the hub" in await refusal(
        api, "/api/pull", 404, model="llama3"
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/api/delete"),
        *(("POST", f"/api/{name}") for name in ("copy", "create", "push", "blobs/sha256:ab")),
    ],
)
async def test_nobody_changes_which_models_there_are(method: str, path: str) -> None:
    got = await Api(FakeGenerator()).http.request(method, path, json={"model": NAME})
    assert got.status_code == 403
    assert got.json()["error"].startswith("models are those of the configuration")
    assert (await Api(FakeGenerator()).http.head("/api/blobs/sha256:ab")).status_code == 404


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps", "/api/version", "/api/show", "/api/nothing"])
async def test_errors_are_in_ollamas_form_also_without_a_key(path: str) -> None:
    rules = Rules(CLASSES, {"": TenantRules((SecretStr("k"),))})
    api = Api(FakeGenerator(), SETTINGS, rules)
    refused: Any = await (api.post(path, {}) if path.endswith("show") else api.http.get(path))
    assert refused.status_code == (404 if path.endswith("nothing") else 401)
    assert isinstance(refused.json()["error"], str)
    assert refused.headers["x-request-id"]
