"""Cross-encoders and rerankers behind /v1/score and /v1/rerank: the scores of sentence-transformers' CrossEncoder."""

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.bert import BertTokenizer

from cluster.ingress.model_card import read_model_card
from core.errors import ConfigError, UnsupportedModel
from models.files.hub import resolve
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.generation.test_encoders import served, settings
from tests.models.encoder_checkpoints import FIELDS

QUERY = "where does the sun rise"
DOCUMENTS = ["in the east", "x", "it sets in the west " * 4, "def add(a, b)", "the sun"]
DECODER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 160,
}


def tokenizer(folder: Path, kind: str) -> Any:
    """For BERT one that says which of two texts a token is of."""
    if kind == "bert":
        letters = string.printable.strip()
        words = [
            "[PAD]",
            "[UNK]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            *letters,
            *(f"##{letter}" for letter in letters),
        ]
        (folder / "vocab.txt").write_text("\n".join(words))
        made: Any = BertTokenizer
        return made(str(folder / "vocab.txt"))
    made = AutoTokenizer.from_pretrained(resolve("embedded"))
    made.pad_token, made.chat_template = made.eos_token, None
    return made


def checkpoint(
    folder: Path, kind: str, *, num_labels: int = 1, by_tokens: bool = False, **how: Any
) -> CrossEncoder:
    torch.manual_seed(2)
    tok = tokenizer(folder, kind)
    fields = {**FIELDS.get(kind, DECODER), "vocab_size": len(tok), "pad_token_id": tok.pad_token_id}
    if kind == "xlm-roberta":
        fields["max_position_embeddings"] += tok.pad_token_id
    config = AutoConfig.for_model(kind, num_labels=num_labels, **fields)
    made: Any = AutoModelForCausalLM if by_tokens else AutoModelForSequenceClassification
    model = made.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    plain = str(folder / "plain")
    model.save_pretrained(plain)
    tok.save_pretrained(plain)
    if by_tokens:
        modules: list[Any] = [Transformer(plain, transformer_task="text-generation"), LogitScore(5, 9)]
        reference = CrossEncoder(modules=modules, device="cpu", **how)
    else:
        reference = CrossEncoder(plain, device="cpu", **how)
    reference.save_pretrained(str(folder / "model"))
    return reference


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("bert", {}),
        ("xlm-roberta", {"activation_fn": torch.nn.Identity()}),
        ("modernbert", {}),
        ("distilbert", {}),
        ("electra", {}),
        ("deberta-v2", {}),
        ("qwen3", {}),
        ("llama", {"by_tokens": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_scores_are_those_of_a_cross_encoder(kind: str, how: dict[str, Any], tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, kind, **how)
    want = reference.predict([(QUERY, document) for document in DOCUMENTS], batch_size=1)
    assert np.ptp(want) > 1e-3
    async with served(tmp_path / "model") as (client, _):
        body = {"model": NAME, "text_1": QUERY, "text_2": DOCUMENTS}
        answer = await client.post("/score", body=body, cast_to=object)
        np.testing.assert_allclose([each["score"] for each in answer["data"]], want, atol=1e-5)  # type: ignore[index]
        pairs = {"model": NAME, "text_1": DOCUMENTS, "text_2": DOCUMENTS[::-1]}
        answer = await client.post("/score", body=pairs, cast_to=object)
        own = reference.predict([*zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)], batch_size=1)
        np.testing.assert_allclose([each["score"] for each in answer["data"]], own, atol=1e-5)  # type: ignore[index]
        body = {"model": NAME, "query": QUERY, "documents": DOCUMENTS, "top_n": 3}
        ranked = (await client.post("/rerank", body=body, cast_to=object))["results"]  # type: ignore[index]
        assert [each["index"] for each in ranked] == np.argsort(-want, kind="stable").tolist()[:3]
        with pytest.raises(openai.BadRequestError, match="scores pairs of texts"):
            await client.embeddings.create(model=NAME, input="x")
        with pytest.raises(openai.BadRequestError, match="scores pairs of texts"):
            await client.completions.create(model=NAME, prompt="x")


def test_a_scorer_that_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint(tmp_path, "bert", num_labels=3)
    with pytest.raises(UnsupportedModel, match="has 3 labels"):
        read_model_card(settings(tmp_path / "model"))
    checkpoint(tmp_path, "bert")
    folder = tmp_path / "model"
    for pooling in ("none", "cls"):
        with pytest.raises(ConfigError, match="leave it at auto"):
            read_model_card(settings(folder, **{"model.pooling": pooling}))
    said = folder / "config_sentence_transformers.json"
    said.write_text(json.dumps({"activation_fn": "torch.nn.modules.activation.Tanh"}))
    with pytest.raises(UnsupportedModel, match="Tanh, where Sigmoid and Identity is supported"):
        read_model_card(settings(folder))
