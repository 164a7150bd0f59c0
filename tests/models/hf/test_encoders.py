"""Encoders of every kind: hidden states of texts in one row are those that transformers computes of each alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from core.errors import UnsupportedModel
from models.families.table import read_spec
from models.hf import encoder_model
from models.registry import load_encoder, load_model
from tests.models.encoder_checkpoints import FIELDS

CPU = torch.device("cpu")


def saved(folder: Path, kind: str) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModel.from_config(AutoConfig.for_model(kind, **FIELDS[kind])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", FIELDS)
@torch.inference_mode()
def test_texts_in_one_row_are_computed_as_if_alone(kind: str, tmp_path: Path) -> None:
    reference = saved(tmp_path, kind)
    encode, _ = load_encoder(tmp_path, "float32", CPU)
    longest = read_spec(tmp_path).max_context_tokens
    texts = [torch.randint(4, 99, (length,)) for length in (7, 1, 30, longest, 12)]
    for got, text in zip(encode(texts, []), texts, strict=True):
        torch.testing.assert_close(
            got, reference(input_ids=text[None]).last_hidden_state[0], atol=1e-5, rtol=0
        )


def test_an_encoder_whose_layers_differ_from_what_they_ask_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, "roberta")
    monkeypatch.setattr(encoder_model, "first_position", lambda _: 0)
    with pytest.raises(UnsupportedModel, match="'RobertaModel'.* off what transformers computes"):
        load_encoder(tmp_path, "float32", CPU)


def test_an_encoder_is_not_taken_for_a_model_that_generates(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    with pytest.raises(UnsupportedModel, match="'BertModel' is an encoder"):
        load_model(tmp_path, "float32", CPU)
