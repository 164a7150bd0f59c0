"""Encoders behind /v1/embeddings: sentence-transformers' vectors of the same checkpoint, whatever the pools."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoConfig, AutoModel, AutoTokenizer

from cluster.ingress.api_factory import build_app
from cluster.ingress.model_card import read_model_card
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.live_rules import LiveRules
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig, load
from core.errors import ConfigError, UnsupportedModel
from models.files.hub import resolve
from tests.cluster.ingress.api.fakes import NAME
from tests.models.encoder_checkpoints import FIELDS

SIZE, CONTEXT = 32, 140
TEXTS = [
    "the sun rises",
    "in the east",
    "x",
    "def add(a, b):\n    return a + b",
    "and then it sets in the west " * 6,
]


def checkpoint(folder: Path, kind: str, mode: Any, *behind: Any) -> SentenceTransformer:
    """A tiny random encoder, saved as sentence-transformers saves it."""
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded"))
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, None
    fields = {**FIELDS[kind], "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if kind in ("xlm-roberta", "mpnet"):
        fields["max_position_embeddings"] = CONTEXT + tokenizer.pad_token_id + 1
    model = AutoModel.from_config(AutoConfig.for_model(kind, **fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    plain = folder / "plain"
    model.save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    modules: list[Any] = [Transformer(str(plain)), Pooling(SIZE, pooling_mode=mode), *behind]
    made = SentenceTransformer(modules=modules, device="cpu")
    made.save(str(folder / "model"))
    return made


@asynccontextmanager
async def served(folder: Path, **keys: Any) -> AsyncGenerator[tuple[openai.AsyncOpenAI, LocalCluster]]:
    config = settings(folder, **keys)
    async with LocalCluster.running(config) as cluster:
        app = build_app(
            cluster.frontend, config, read_model_card(config), LiveRules(config).access, make_observers(NAME)
        )
        http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api")
        async with http:
            yield (
                openai.AsyncOpenAI(base_url="http://api/v1", api_key="k", http_client=http, max_retries=0),
                cluster,
            )


def settings(folder: Path, **keys: Any) -> ClusterConfig:
    values = {"model.path": str(folder), "model.name": NAME, "engine.max_batch_tokens": 24}
    return load(None, {}, values | keys)


async def vectors(client: openai.AsyncOpenAI, texts: Any) -> list[list[float]]:
    return [each.embedding for each in (await client.embeddings.create(model=NAME, input=texts)).data]


@pytest.mark.parametrize(
    ("kind", "mode", "behind"),
    [
        ("bert", "cls", [Normalize()]),
        ("xlm-roberta", "mean", [Normalize()]),
        ("modernbert", "mean", []),
        ("mpnet", "mean", [Dense(SIZE, 20, activation_function=torch.nn.Tanh()), Normalize()]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_vectors_are_those_of_sentence_transformers(
    kind: str, mode: str, behind: list[Any], tmp_path: Path
) -> None:
    want = checkpoint(tmp_path, kind, mode, *behind).encode(TEXTS, batch_size=1)
    async with served(tmp_path / "model", **{"decode_instances": 2}) as (client, _):
        alone = [await vectors(client, text) for text in TEXTS]
        together = await asyncio.gather(*(vectors(client, TEXTS) for _ in range(4)))
        for got in ([each[0] for each in alone], *together):
            np.testing.assert_allclose(got, want, atol=1e-5)
        cut = await client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=8)
        assert len(cut.data[0].embedding) == 8
        with pytest.raises(openai.BadRequestError, match="embeds texts"):
            await client.completions.create(model=NAME, prompt="x")


async def test_a_text_may_fill_the_context_which_is_more_than_a_steps_tokens(tmp_path: Path) -> None:
    reference: Any = checkpoint(tmp_path, "xlm-roberta", "mean")
    tokens = [5 + number % 200 for number in range(CONTEXT)]
    async with served(tmp_path / "model") as (client, _):
        (got,), many = await vectors(client, [tokens]), await vectors(client, [tokens, [7], tokens, [8, 9]])
        with torch.inference_mode():
            want = reference[0].model(input_ids=torch.tensor([tokens])).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(got, want, atol=1e-5)
        np.testing.assert_allclose(many[2], want, atol=1e-5)
        with pytest.raises(
            openai.BadRequestError, match=f"has {CONTEXT + 1} tokens; this model takes {CONTEXT}"
        ):
            await vectors(client, [[*tokens, 5]])


def test_an_encoder_without_files_is_pooled_by_the_mean_and_what_it_cannot_do_is_refused(
    tmp_path: Path,
) -> None:
    checkpoint(tmp_path, "bert", "mean")
    plain = tmp_path / "plain"
    card = read_model_card(settings(plain))
    assert card.pooling is not None
    assert (card.pooling.kind, card.pooling.normalise, card.generates) == ("mean", False, False)
    assert not read_model_card(settings(plain, **{"model.pooling": "cls"})).generates
    for key, value in {
        "model.pooling": "none",
        "engine.kv_bytes": 1 << 20,
        "engine.kv_dtype": "int8",
        "prefill.tp": 2,
    }.items():
        with pytest.raises(ConfigError, match=r"encoder|an instance of it is one rank|does not generate"):
            read_model_card(settings(plain, **{key: value}))
    config = plain / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"architectures": ["BertForTokenClassification"]})
    )
    with pytest.raises(UnsupportedModel, match="BertForTokenClassification"):
        read_model_card(settings(plain))
