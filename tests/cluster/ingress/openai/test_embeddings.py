"""/v1/embeddings, /v1/rerank and /v1/score: sentence-transformers' vectors of the same checkpoint."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from torch.nn import Identity
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

from cluster.ingress.api_factory import build_app
from cluster.ingress.model_card import read_model_card
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.access import Rules, TenantRules
from cluster.ingress.tenants.live_rules import LiveRules
from cluster.ingress.tenants.use_limits import UseLimits
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig, load
from core.errors import UnsupportedModel
from core.types import FinishReason, Request
from models.files.hub import resolve
from models.pooling.pooling import Pooling as PoolingSpec
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, SETTINGS, Api

EMBEDDINGS = "/v1/embeddings"
TEXTS = [
    "the sun rises",
    "in the east",
    "def add(a, b):\n    return a + b",
    "x",
    "the sun rises in the east " * 8,
]
SIZE = 24


def checkpoint(folder: Path, mode: Any, *behind: Any, normalise: bool) -> SentenceTransformer:
    """A tiny Qwen3-Embedding, saved as sentence-transformers saves it: without a head, and without the prefix of its names."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded"))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=SIZE,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    plain = folder / "plain"
    Qwen3Model(config).save_pretrained(plain)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = None  # sentence-transformers would make a message of each text
    tokenizer.save_pretrained(plain)
    modules: list[Any] = [Transformer(str(plain)), Pooling(SIZE, pooling_mode=mode), *behind]
    model = SentenceTransformer(modules=[*modules, Normalize()] if normalise else modules, device="cpu")
    model.save(str(folder / "model"))
    return model


def settings(folder: Path, **keys: Any) -> ClusterConfig:
    values = {
        "model.path": str(folder),
        "model.name": NAME,
        "engine.block_size": 4,
        "engine.num_blocks": 200,
        "engine.max_batch_tokens": 16,
    }
    return load(None, {}, values | keys)


@pytest.mark.parametrize(
    ("mode", "normalise", "behind"),
    [
        ("lasttoken", True, []),
        ("mean", True, []),
        ("mean", False, [Dense(SIZE, 40), Dense(40, 12, bias=False, activation_function=Identity())]),
    ],
)
async def test_vectors_are_those_of_sentence_transformers(
    mode: str, normalise: bool, behind: list[Any], tmp_path: Path
) -> None:
    reference = checkpoint(tmp_path, mode, *behind, normalise=normalise)
    want = reference.encode(TEXTS, batch_size=1)
    config = settings(tmp_path / "model")
    async with LocalCluster.running(config) as cluster:
        app = build_app(
            cluster.frontend, config, read_model_card(config), LiveRules(config).access, make_observers(NAME)
        )
        http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api")
        client = openai.AsyncOpenAI(base_url="http://api/v1", api_key="k", http_client=http, max_retries=0)
        for _ in ("nothing cached", "all of it"):
            got = await client.embeddings.create(model=NAME, input=TEXTS)
            np.testing.assert_allclose([each.embedding for each in got.data], want, atol=1e-5)
        as_numbers = await client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float")
        np.testing.assert_allclose([each.embedding for each in as_numbers.data], want, atol=1e-5)
        cut = await client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=8)
        short = reference.encode(TEXTS[:1], truncate_dim=8, normalize_embeddings=normalise)
        np.testing.assert_allclose([each.embedding for each in cut.data], short, atol=1e-5)
        limit, reference.max_seq_length = reference.max_seq_length, 5
        begun = await client.embeddings.create(
            model=NAME, input=TEXTS, extra_body={"truncate_prompt_tokens": 5}
        )
        shortest = reference.encode(TEXTS, batch_size=1)
        np.testing.assert_allclose([each.embedding for each in begun.data], shortest, atol=1e-5)
        reference.max_seq_length = limit
        assert cut.usage.prompt_tokens == len(reference.tokenizer(TEXTS[0])["input_ids"])
        ranked = (await http.post("/v1/rerank", json=_rerank(TEXTS[0], TEXTS))).json()["results"]
        near = _cosines(want[0], want)
        assert [each["index"] for each in ranked] == np.argsort(-np.array(near), kind="stable").tolist()
        assert [each["relevance_score"] for each in ranked] == pytest.approx(
            sorted(near, reverse=True), abs=1e-4
        )
        refused = await http.post("/v1/completions", json={"model": NAME, "prompt": "x"})
        assert refused.status_code == 400
        assert "embeds texts (/v1/embeddings) and does not generate" in refused.json()["error"]["message"]
        await http.aclose()


def _cosines(one: np.ndarray, others: np.ndarray) -> list[float]:
    return [float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)) for other in others]


def _rerank(query: str, documents: list[Any]) -> dict[str, Any]:
    return {"model": NAME, "query": query, "documents": documents}


def test_a_model_that_pools_otherwise_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    checkpoint(tmp_path, "lasttoken", normalise=True)
    config = settings(tmp_path / "model")
    card = read_model_card(config)
    assert (card.pooling, card.generates) == (PoolingSpec(kind="last"), False)
    assert read_model_card(settings(tmp_path / "model", **{"model.pooling": "none"})).generates
    modules = tmp_path / "model" / "modules.json"
    entries = json.loads(modules.read_text())
    pooling = tmp_path / "model" / entries[1]["path"] / "config.json"
    for content in (
        {"pooling_mode": "weightedmean"},
        {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
        {},
    ):
        pooling.write_text(json.dumps({"word_embedding_dimension": SIZE, **content}))
        with pytest.raises(UnsupportedModel, match="pools by"):
            read_model_card(config)
    pooling.write_text(json.dumps({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}))
    assert read_model_card(config).pooling == card.pooling
    for kind in ("Dense", "LSTM"):  # a dense layer behind Normalize would have to be normalised again
        modules.write_text(
            json.dumps([*entries, {"path": "3", "type": f"sentence_transformers.models.{kind}"}])
        )
        with pytest.raises(UnsupportedModel, match=f"has the module '{kind}'"):
            read_model_card(config)
    dense = tmp_path / "model" / "2_Dense"
    dense.mkdir()
    for fields, why in (
        ({"activation_function": "torch.nn.modules.activation.Hardswish"}, "the activation 'Hardswish'"),
        ({"module_input_name": "token_embeddings"}, "module_input_name 'token_embeddings'"),
        ({"out_features": None}, "out_features None"),
    ):
        (dense / "config.json").write_text(json.dumps({"in_features": SIZE, "out_features": 8, **fields}))
        modules.write_text(json.dumps([*entries[:2], {"path": "2_Dense", "type": "models.Dense"}]))
        with pytest.raises(UnsupportedModel, match=why):
            read_model_card(config)


class VectorGenerator(FakeGenerator):
    """A prompt's vector is (its first byte, its length, 0, 0)."""

    def __init__(self) -> None:
        super().__init__(pause_s=0.001)
        self.running = self.most = 0

    async def generate(self, request: Request, shared: object = None):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async for token in super().generate(request):
                numbers = np.array([request.prompt[0], len(request.prompt), 0, 0], "<f4")
                yield replace(token, embedding=numbers.tobytes(), finish=FinishReason.LENGTH)
        finally:
            self.running -= 1


EMBEDS = replace(SETTINGS, pooling=PoolingSpec(kind="last", max_tokens=50), embedding_size=4)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    api = Api(VectorGenerator(), EMBEDS)
    yield api
    await api.http.aclose()


BAD: list[tuple[str, Any, str]] = [
    (EMBEDDINGS, {"input": []}, "input"),
    (EMBEDDINGS, {"input": "x" * 51}, "input"),
    (EMBEDDINGS, {"input": ["x", "y" * 51]}, "input"),
    (EMBEDDINGS, {"input": ["x"] * 2049}, "input"),
    (EMBEDDINGS, {"input": [999]}, "input"),
    (EMBEDDINGS, {"input": "x", "dimensions": 5}, "dimensions"),
    (EMBEDDINGS, {"input": "x", "dimensions": 0}, "dimensions"),
    (EMBEDDINGS, {"input": "x", "encoding_format": "hex"}, "encoding_format"),
    (EMBEDDINGS, {"input": "x", "stream": True}, "stream"),
    (EMBEDDINGS, {"input": "x", "service_tier": "none such"}, "service_tier"),
    ("/v1/rerank", {"query": "", "documents": ["x"]}, "query"),
    ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "x", "documents": ["x"], "top_n": 0}, "top_n"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
]


@pytest.mark.parametrize(("path", "body", "field"), BAD)
async def test_bad_input_is_refused_by_name(api: Api, path: str, body: dict[str, Any], field: str) -> None:
    answer = await api.post(path, {"model": NAME, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert api.generator.requests == []


async def test_many_texts_come_back_in_order_and_a_few_at_a_time(api: Api) -> None:
    texts = [chr(32 + n % 90) * (1 + n % 40) for n in range(500)]
    got = await api.openai.embeddings.create(model=NAME, input=texts)
    want = np.array([[ord(text[0]), len(text), 0, 0] for text in texts], float)
    want /= np.linalg.norm(want, axis=1, keepdims=True)
    np.testing.assert_allclose([each.embedding for each in got.data], want, rtol=1e-6)
    assert [each.index for each in got.data] == list(range(500))
    assert got.usage.prompt_tokens == got.usage.total_tokens == sum(map(len, texts))
    assert api.generator.most == 32  # type: ignore[attr-defined]


async def test_scores_of_pairs_and_of_one_with_many(api: Api) -> None:
    async def scores(one: Any, other: Any) -> list[float]:
        answer = await api.post("/v1/score", {"model": NAME, "text_1": one, "text_2": other})
        return [each["score"] for each in answer.json()["data"]]

    assert await scores("a", ["a", "aaaa"]) == pytest.approx([1.0, 0.999], abs=1e-3)
    assert await scores(["a", "b"], ["a", "b"]) == pytest.approx([1.0, 1.0])
    answer = await api.post(
        "/rerank", {**_rerank("!", ["!" * 40, {"text": "!"}]), "top_n": 1, "return_documents": True}
    )
    (best,) = answer.json()["results"]
    assert (best["index"], best["document"]) == (1, {"text": "!"})


async def test_a_tenant_is_charged_its_prompts_and_may_have_few_at_a_time(api: Api) -> None:
    limits = UseLimits(tokens_per_min=100, concurrent=40)
    tight = Api(VectorGenerator(), EMBEDS, Rules(CLASSES, {"": TenantRules(limits=limits)}))
    body = {"model": NAME, "input": ["x"] * 60}
    assert (await tight.post(EMBEDDINGS, body)).status_code == 200
    assert (await tight.post(EMBEDDINGS, body)).status_code == 429
    await tight.http.aclose()


async def test_a_model_that_does_not_embed_says_what_to_do() -> None:
    api = Api(FakeGenerator())
    answer = await api.post(EMBEDDINGS, {"model": NAME, "input": "x"})
    assert answer.status_code == 400
    assert "model.pooling=last" in answer.json()["error"]["message"]
    await api.http.aclose()
