"""Finds out what transformers' layers keep of a sequence, by running them over tensors without values.

So it is known before a weight is read, for any class: nothing is read from a configuration that a class may understand in its own
way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoConfig

from models.hf.cache_tree import CachePlan, UnknownCache, plan_of
from models.hf.sequence_layers import PROBED, CachedForward
from models.hf.without_values import without_values
from models.spec.foreign_cache import ForeignCache

_NAME: Final = "baton_shapes"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A layer that asks for attention."""

    layer: int
    heads: tuple[int, int]
    """KV heads, and the dimensions of each."""
    is_new: bool
    """Whether its keys are its own. Otherwise they are those of an earlier layer."""


@dataclass(frozen=True, slots=True)
class LayersKeep:
    """What a model's layers keep of a sequence. Neither: nobody knows."""

    heads: tuple[int, int] | None = None
    """KV heads of each layer and dimensions of each, where all layers ask for attention over them and keep nothing else."""
    cache: ForeignCache | None = None
    """What transformers' cache keeps otherwise."""
    num_weights: int = 0
    """The numbers in its weights."""
    why: str = ""
    """Why it is not known, as the end of a sentence."""


@lru_cache(maxsize=16)
def kept_by(folder: Path, config_json: str, architecture: str, num_layers: int, *, packs: bool) -> LayersKeep:
    """Return what the layers keep. `config_json` is the text of config.json, which decides. `packs`: whether tokens of several
    sequences may be in one row, as far as the configuration says."""
    del config_json
    kind: Any = getattr(transformers, architecture)
    try:
        with without_values():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            if not isinstance(config, kind.config_class):
                config = config.get_text_config()
            causal = kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
            causal.set_experts_implementation("eager")
    except Exception as error:
        return LayersKeep(why=f"transformers cannot build it: {error}")
    num_weights = sum(parameter.numel() for parameter in causal.parameters())
    plan = _plan(causal)
    if isinstance(plan, CachePlan) and not plan.growing and not plan.fixed:
        plan = "its layers keep nothing in a cache"
    asked = _asked_for(causal) if packs and kind._supports_attention_backend else ()
    if not (isinstance(plan, CachePlan) and plan.fixed) and (found := _packed(asked, num_layers)):
        return replace(found, num_weights=num_weights)
    if isinstance(plan, str):
        return LayersKeep(why=plan)
    return LayersKeep(cache=_place(plan, asked), num_weights=num_weights)


def _packed(asked: Sequence[_Asked], num_layers: int) -> LayersKeep | None:
    """Return what is kept where all layers attend through transformers' interface; None where it is not so."""
    heads = _alike(asked)
    if heads is None or [one.layer for one in asked] != list(range(num_layers)):
        return None
    num_new = sum(one.is_new for one in asked)
    if num_new == num_layers:
        return LayersKeep(heads=heads)
    shared = ForeignCache(
        num_layers=num_new, num_kv_heads=heads[0], head_dim=heads[1], attends=tuple(range(num_layers))
    )
    return LayersKeep(cache=shared)


def _place(plan: CachePlan, asked: Sequence[_Asked]) -> ForeignCache:
    """Return where the cache is stored. `asked` are the layers that attend through transformers' interface."""
    if not plan.growing:
        return ForeignCache.of_numbers(0, plan.state_bytes, ())
    if plan.heads is None:
        return ForeignCache.of_numbers(plan.numbers, plan.state_bytes)
    num_kv_heads, head_dim = plan.heads
    owners = [leaf.path[2] for leaf in plan.growing[::2]]
    is_packed = _alike(asked) == plan.heads and owners == [one.layer for one in asked if one.is_new]
    if plan.fixed and not is_packed:
        return ForeignCache.of_numbers(plan.numbers, plan.state_bytes)
    return ForeignCache(
        num_layers=len(owners),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        state_bytes=plan.state_bytes,
        attends=tuple(one.layer for one in asked) if is_packed and plan.fixed else None,
    )


def _alike(asked: Sequence[_Asked]) -> tuple[int, int] | None:
    """Return the KV heads of all layers, and their dimensions; None where they differ."""
    shapes = {one.heads for one in asked}
    return shapes.pop() if len(shapes) == 1 else None


def _plan(causal: Any) -> CachePlan | str:
    """Return what the cache keeps, or why that is not known."""
    try:
        forward = CachedForward(causal)
        with without_values():
            return plan_of(forward.probe(torch.zeros(sum(PROBED), dtype=torch.int64)))
    except UnknownCache as error:
        return str(error)
    except Exception as error:
        return f"what its layers keep is not known, since transformers' code stops without values: {error}"


def _asked_for(causal: Any) -> Sequence[_Asked]:
    """Return the layers that ask for attention through transformers' interface; none where some attend by a mask of their own."""
    asked: list[_Asked] = []
    keys: list[Tensor] = []

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        if mask is not None:
            raise UnknownCache("it attends by a mask of its own")
        is_new = not any(key is one for one in keys)
        keys.append(key)
        asked.append(_Asked(int(module.layer_idx), (key.shape[1], query.shape[3]), is_new))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_NAME, attend)
    told: dict[str, Tensor] = {"input_ids": torch.zeros(1, sum(PROBED), dtype=torch.int64, device="meta")}
    if "position_ids" in signature(causal.base_model.forward).parameters:
        told["position_ids"] = torch.zeros_like(told["input_ids"])
    try:
        with without_values():
            causal.set_attn_implementation(_NAME)
            causal.base_model(**told, use_cache=False)
    except Exception:
        return ()
    return asked
