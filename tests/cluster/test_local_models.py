"""Three models of different families in one process: each answers as it does alone, and what one does is no matter to others."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import SecretStr
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cluster.ingress.api_factory import build_app_of, door_observers
from cluster.ingress.model_card import read_model_card
from cluster.ingress.tenants.live_rules import LiveRules
from cluster.local import LocalCluster, local_models
from core.config.cluster_config import ClusterConfig, load
from models.files.hub import resolve
from tests.patience import PATIENCE_S

FIELDS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
PROMPTS = ["def add(a, b):", "the sun rises in the", "import os\n"]
Answers = dict[tuple[str, str], str]


def checkpoint(folder: Path, family: str) -> Path:
    """A tiny random decoder with the embedded model's tokenizer."""
    torch.manual_seed(len(family))
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded"))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **FIELDS, vocab_size=len(tokenizer))
    )
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "baton-embedded": {"path": "embedded", "aliases": ["code"]},
        "llama": {"path": str(checkpoint(folder / "llama", "llama")), "engine": {"block_size": 8}},
        "qwen3": {"path": str(checkpoint(folder / "qwen3", "qwen3")), "prefill_instances": 0},
    }


def table(rows: dict[str, Any], **others: Any) -> ClusterConfig:
    return load({"models": rows, "engine": {"num_blocks": 64}, **others}, {})


class Running:
    def __init__(self, http: httpx.AsyncClient, clusters: dict[str, LocalCluster]) -> None:
        self.http, self.clusters = http, clusters

    async def answer(self, model: str, prompt: str, num_tokens: int = 12) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    async def answers(self, *models: str) -> Answers:
        asked = [(model, prompt) for model in models for prompt in PROMPTS]
        return dict(zip(asked, await asyncio.gather(*(self.answer(*each) for each in asked)), strict=True))


@asynccontextmanager
async def served(config: ClusterConfig) -> AsyncGenerator[Running]:
    cards = [read_model_card(row) for row in config.rows]
    async with local_models(config, cards) as running:
        models = [model for model, _ in running]
        app = build_app_of(models, config, LiveRules(config).access, door_observers(config, models))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://api", timeout=PATIENCE_S
        ) as http:
            yield Running(http, {model.card.name: cluster for model, cluster in running})


async def test_each_answers_as_it_does_alone(rows: dict[str, Any]) -> None:
    alone: Answers = {}
    for name, one in rows.items():
        async with served(table({name: one})) as running:
            alone |= await running.answers(name)
    async with served(table(rows)) as running:
        assert await running.answers(*rows) == alone
        assert await running.answer("code", PROMPTS[0]) == alone["baton-embedded", PROMPTS[0]]
        instances = {name: len(cluster.instances) for name, cluster in running.clusters.items()}
        assert instances == {"baton-embedded": 2, "llama": 2, "qwen3": 1}
        dropped = (await running.http.post("/flush_cache")).json()["dropped"]
        assert sorted(address.partition("/")[0] for address in dropped) == [
            *["loopback:baton-embedded"] * 2,
            *["loopback:llama"] * 2,
            "loopback:qwen3",
        ]
        metrics = (await running.http.get("/metrics")).text
        assert 'baton_instances{model="qwen3",role="decode"} 1.0' in metrics
    assert len(set(alone.values())) > len(PROMPTS)


async def test_a_models_death_is_no_matter_to_the_others(rows: dict[str, Any]) -> None:
    async with served(table(rows)) as running:
        want = await running.answers(*rows)
        long = asyncio.create_task(running.answer("llama", PROMPTS[0], num_tokens=100))
        (dying,) = running.clusters["qwen3"].instances
        dying.on_error(RuntimeError("the device is gone"))
        others = [name for name in rows if name != "qwen3"]
        assert await running.answers(*others) == {
            key: text for key, text in want.items() if key[0] != "qwen3"
        }
        assert await long
        assert (await running.http.get("/ready")).status_code == 200
        await running.clusters["qwen3"].serving()
        assert await running.answers("qwen3") == {
            key: text for key, text in want.items() if key[0] == "qwen3"
        }


async def test_one_of_several_models_sleeps_and_wakes_up(rows: dict[str, Any]) -> None:
    manual = {"schedule": {"residency": {"mode": "manual"}}}
    async with served(table(rows, **manual)) as running:
        want = await running.answers(*rows)
        for path in ("/sleep?model=code&level=2&mode=wait&timeout=30&drop_kv=false", "/sleep?model=llama"):
            assert (await running.http.post(path)).json() == {"is_sleeping": True}, path
        for name in rows:
            asleep = (await running.http.get(f"/is_sleeping?model={name}")).json()["is_sleeping"]
            assert asleep == (name != "qwen3")
        assert await running.answers("qwen3") == {key: want[key] for key in want if key[0] == "qwen3"}
        for name in ("baton-embedded", "llama"):
            assert (await running.http.post(f"/wake_up?model={name}")).json() == {"is_sleeping": False}
        assert await running.answers(*rows) == want


async def test_a_tenant_is_told_of_its_models_alone(rows: dict[str, Any]) -> None:
    keys = {
        "serve": {"api_keys": [SecretStr("all")]},
        "tenants": {"acme": {"keys": ["acme"], "models": ["llama"]}},
    }
    async with served(table(rows, **keys)) as running:
        for key, names in (("acme", {"llama"}), ("all", {*rows, "code"})):
            running.http.headers["authorization"] = f"Bearer {key}"
            listed = (await running.http.get("/v1/models")).json()["data"]
            assert {each["id"] for each in listed} == names
        running.http.headers["authorization"] = "Bearer acme"
        assert await running.answer("llama", PROMPTS[0])
        hidden = await running.http.post("/v1/completions", json={"model": "qwen3", "prompt": "x"})
        assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "model_not_found")
