"""Checkpoints that say how well two texts go together (cross-encoders, rerankers): which hidden state that is read from, and the
layers that make one number of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from core.errors import UnsupportedModel
from models.pooling.pooling import Pooling, PoolingKind, modules_of
from models.pooling.readout_layers import LayerSpec, TokenLogits, dense_layers
from models.spec.model_spec import read_json

SCORER: Final = "ForSequenceClassification"
_BEHIND_FIRST: Final = (LayerSpec("classifier.dense", "Tanh"), LayerSpec("classifier.out_proj"))
ENCODER_HEADS: Final[dict[str, tuple[LayerSpec, ...]]] = {
    "albert": (LayerSpec("albert.pooler", "Tanh"), LayerSpec("classifier")),
    "bert": (LayerSpec("bert.pooler.dense", "Tanh"), LayerSpec("classifier")),
    "camembert": _BEHIND_FIRST,
    "deberta-v2": (LayerSpec("pooler.dense", "GELU"), LayerSpec("classifier")),
    "distilbert": (LayerSpec("pre_classifier", "ReLU"), LayerSpec("classifier")),
    "electra": (LayerSpec("classifier.dense", "GELU"), LayerSpec("classifier.out_proj")),
    "modernbert": (LayerSpec("head.dense", "GELU", norm="head.norm"), LayerSpec("classifier")),
    "mpnet": _BEHIND_FIRST,
    "roberta": _BEHIND_FIRST,
    "xlm-roberta": _BEHIND_FIRST,
}
"""The heads of encoders; those of decoders are one layer."""
_PLAIN_HEADS: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Decoders whose logits are the head's product and nothing else."""
_ACTIVATIONS: Final = {"deberta-v2": "pooler_hidden_act", "modernbert": "classifier_activation"}
"""Where config.json may name another than GELU."""


def is_scorer(config: Mapping[str, Any]) -> bool:
    return str((config.get("architectures") or [""])[0]).endswith(SCORER)


def read_scoring(folder: Path) -> Pooling | None:
    """None where the checkpoint does not score. Raises ConfigError and UnsupportedModel."""
    config = read_json(folder / "config.json")
    kinds = [kind for _, kind in modules_of(folder)]
    if not is_scorer(config):
        if "LogitScore" not in kinds:
            return None
        if kinds != ["Transformer", "LogitScore"]:
            raise _refused(
                folder / "modules.json",
                f"has the modules {', '.join(kinds)}, where Transformer and LogitScore",
            )
        if config["architectures"][0] not in _PLAIN_HEADS:
            raise _refused(
                folder / "modules.json",
                f"has LogitScore for {config['architectures'][0]}, where {', '.join(_PLAIN_HEADS)}",
            )
        _check_inputs(folder)
        return Pooling(kind="last", normalise=False, scores=True, sigmoid=_has_sigmoid(folder, config))
    if kinds not in ([], ["Transformer"]):
        raise _refused(
            folder / "modules.json", f"has the modules {', '.join(kinds)}, where Transformer alone"
        )
    _check_inputs(folder)
    num_labels = len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels", 2))
    if num_labels != 1:
        raise _refused(folder / "config.json", f"has {num_labels} labels, where a score is one")
    return Pooling(kind=_kind(config), normalise=False, scores=True, sigmoid=_has_sigmoid(folder, config))


def score_layers(folder: Path) -> tuple[LayerSpec | TokenLogits, ...]:
    """What follows the pooled hidden state; nothing where the checkpoint does not score. Raises as `read_scoring`."""
    config = read_json(folder / "config.json")
    if is_scorer(config):
        kind = config.get("model_type", "")
        if (named := config.get(_ACTIVATIONS.get(kind, ""), "gelu")) != "gelu":
            raise _refused(folder / "config.json", f"says {_ACTIVATIONS[kind]} {named!r}, where gelu")
        return ENCODER_HEADS.get(kind, (LayerSpec("score"),))
    for path, kind in modules_of(folder):
        if kind == "LogitScore":
            ids = read_json(folder / path / "config.json")
            yes, no = ids.get("true_token_id"), ids.get("false_token_id")
            if not (isinstance(yes, int) and isinstance(no, int | None)):
                raise _refused(folder / path, f"has the tokens {yes!r} and {no!r}, where ids")
            return (TokenLogits(yes, no),)
    return ()


def vector_size(folder: Path, hidden_size: int) -> int:
    """Numbers of what is made of a text. Raises ConfigError and UnsupportedModel."""
    if score_layers(folder):
        return 1
    dense = dense_layers(folder)
    return dense[-1].num_out if dense else hidden_size


def _kind(config: Mapping[str, Any]) -> PoolingKind:
    kind = config.get("model_type")
    if kind not in ENCODER_HEADS:
        return "last"
    if kind == "modernbert":
        return "mean" if config.get("classifier_pooling") == "mean" else "cls"
    return "cls"


def _check_inputs(folder: Path) -> None:
    """Two texts go through the tokenizer as a pair."""
    path = folder / "sentence_bert_config.json"
    inputs = (read_json(path) if path.exists() else {}).get("modality_config", {"text": {}})
    if "text" not in inputs:
        raise _refused(path, f"takes {', '.join(inputs)}, where pairs of texts")


def _has_sigmoid(folder: Path, config: Mapping[str, Any]) -> bool:
    own = folder / "config_sentence_transformers.json"
    named = (read_json(own) if own.exists() else {}).get("activation_fn")
    named = named or (config.get("sentence_transformers") or {}).get("activation_fn")
    named = str(named or config.get("sbert_ce_default_activation_function") or "Sigmoid")
    activation = named.rpartition(".")[2]
    if activation not in ("Sigmoid", "Identity"):
        raise _refused(folder, f"scores through {named}, where Sigmoid and Identity")
    return activation == "Sigmoid"


def _refused(path: Path, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{path} {why} is supported")
