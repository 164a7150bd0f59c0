"""What all processes but the ranks must know about the served model, read from its folder without touching a weight."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from core.config.adapter_config import ServedAdapter, check_name
from core.config.cluster_config import ClusterConfig
from core.config.pools import pools_of
from core.errors import ConfigError
from engine.planning.whole_prompts import encoder_config
from engine.sizing.model_dims import check_mesh, mesh_of
from models.families.table import read_spec
from models.files.hub import resolve
from models.lora.adapter import read_adapters, read_within
from models.lora.targets import targets_of
from models.pooling.pooling import Pooling, read_pooling
from models.pooling.scoring import is_scorer, read_scoring, vector_size
from models.spec.model_spec import ModelSpec, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    name: str
    folder: str
    architecture: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]
    pooling: Pooling | None
    """How it embeds texts; None where it does not."""
    generates: bool
    embedding_size: int
    """Numbers of a text's vector."""
    adapters: Mapping[str, ServedAdapter]
    """By the name that clients use."""
    image_token: int = -1
    """The token that stands for a row of an image; -1 where the model reads text alone."""


def read_model_card(config: ClusterConfig) -> ModelCard:
    """Read the card. Raises ConfigError for a missing model and for ranks that it cannot be cut for, UnsupportedModel for a model
    that Baton cannot serve."""
    config = config.only
    path = config.model.path
    folder = resolve(path)
    spec = read_spec(folder, config.model.implementation)
    limit = config.model.max_context_tokens
    _check_context(limit, spec, path)
    for pool in pools_of(config):
        check_mesh(spec, mesh_of(pool.parallel), pool.name, pool.parallel.ep_redundant_experts)
    if spec.encodes:
        encoder_config(config.engine, limit or spec.max_context_tokens)
    pooling, size = _pooling(config, folder, spec), vector_size(folder, spec.hidden_size)
    name = config.model.name or _default_name(path)
    return ModelCard(
        name=name,
        folder=str(folder),
        architecture=spec.architecture,
        max_context_tokens=limit or spec.max_context_tokens,
        vocab_size=spec.vocab_size,
        eos_token_ids=tuple(token for token in spec.eos_token_ids if token < spec.vocab_size),
        default_sampling=dict(spec.default_sampling),
        pooling=pooling,
        generates=not spec.encodes and (pooling is None or config.model.pooling != "auto"),
        embedding_size=size,
        adapters=_adapters(config, name, spec),
        image_token=-1 if spec.vision is None else spec.vision.token_id,
    )


def _check_context(limit: int, spec: ModelSpec, path: str) -> None:
    if limit <= spec.max_context_tokens:
        return
    how = ""
    if (
        spec.rope.kind in ("default", "yarn", "linear")
        and not spec.encodes
        and spec.implementation == "baton"
    ):
        first = spec.rope.parameters.get("original_max_position_embeddings", spec.max_context_tokens)
        scaling = {
            "rope_type": "yarn",
            "factor": float(ceil(limit / first)),
            "original_max_position_embeddings": first,
        }
        how = f'. A longer context needs scaled rotary embeddings: "rope_scaling": {json.dumps(scaling)} in its config.json'
    raise ConfigError(
        f"model.max_context_tokens is {limit}, but {path} takes {spec.max_context_tokens} tokens at most{how}"
    )


def describe_adapter(config: ClusterConfig, card: ModelCard, name: str, path: str) -> ServedAdapter:
    """Describe an adapter that may be loaded while the cluster runs, as it lies here. Raises ConfigError for any other."""
    if name in (card.name, *config.model.aliases, *card.adapters):
        raise ConfigError(f"{name!r} is the model's own name, or one of model.adapters: choose another one")
    try:
        check_name(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    spec, limits = read_spec(Path(card.folder), config.model.implementation), config.adapters
    found = read_within(name, path, limits.folders, limits.max_rank, spec)
    return ServedAdapter(found.key, path)


def _adapters(config: ClusterConfig, name: str, spec: ModelSpec) -> dict[str, ServedAdapter]:
    if config.adapters.folders:
        targets_of(spec)  # raises where the model takes none
    paths, names = config.model.adapters, (name, *config.model.aliases)
    if taken := next((own for own in paths if own in names), ""):
        raise ConfigError(f"model.adapters has {taken!r}, which is the model's own name: choose another one")
    found = read_adapters(paths, spec)
    return {own: ServedAdapter(each.key, paths[own]) for own, each in zip(paths, found, strict=True)}


def _pooling(config: ClusterConfig, folder: Path, spec: ModelSpec) -> Pooling | None:
    scoring = read_scoring(folder)
    if scoring is not None and config.model.pooling != "none":
        if config.model.pooling != "auto":
            raise ConfigError(
                f"model.pooling is {config.model.pooling}, but this model scores pairs of texts: leave it at auto"
            )
        return scoring
    match config.model.pooling:
        case "auto":
            # Without files sentence-transformers takes an encoder's mean, too.
            plain = Pooling(kind="mean", normalise=False) if spec.encodes else None
            return read_pooling(folder) or plain
        case "none":
            if spec.encodes or is_scorer(read_json(folder / "config.json")):
                raise ConfigError(
                    f"model.pooling is none, but {spec.architecture} does not generate: leave it at auto"
                )
            return None
        case kind:
            return Pooling(kind=kind)


def _default_name(path: str) -> str:
    if path == "embedded":
        return "baton-embedded"
    return Path(path).resolve().name if Path(path).exists() else path
