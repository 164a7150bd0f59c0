"""Cuts transformers' models down to the part of one rank, as the model's plans say (`tp_plan.py`).

A tensor-parallel rank keeps its part of each matrix that the plan names, and all of everything else, the embedding too. Ranks
meet in hooks behind the modules. A pipeline stage keeps its layers."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernels.collectives import Collectives
from models.hf.tp_plan import DIMS, GATHERED, SUMMED


def keep_stage(causal: Any, names: Sequence[str], layers: range) -> None:
    """Remove what other pipeline stages have: their layers, and what comes before or behind all layers. `names` are those of
    `ModelSpec.stages`."""
    base, at = causal.base_model, names.index("layers")
    is_first, is_last = layers.start == 0, layers.stop == len(base.layers)
    base.layers = nn.ModuleList(base.layers[layers.start : layers.stop])
    for name in (*(() if is_first else names[:at]), *(() if is_last else names[at + 1 :])):
        setattr(base, name, nn.Identity())
    if not is_last:
        causal.set_output_embeddings(nn.Identity())


def cut(causal: nn.Module, plan: Mapping[str, str], collectives: Collectives) -> None:
    """Cut the matrices that the plan names down to this tensor-parallel rank's part. A tensor that two modules share stays whole
    in a module that the plan does not name."""
    for module, name, style in list(_planned(causal, plan)):
        if name:
            _cut_parameter(module, name, style, collectives.share)
            continue
        bias = _without_bias(module) if style == "rowwise" else None
        _cut_parameters(module, style, collectives.share)
        if style in SUMMED:
            module.register_forward_hook(_summed(collectives, bias))
        elif style == GATHERED:
            module.register_forward_hook(_gathered(collectives))


def _planned(causal: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[Any, str, str]]:
    """Yield (module, the name of its parameter or nothing, how that is cut)."""
    patterns = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), style)
        for name, style in plan.items()
        if style in SUMMED or style in DIMS
    ]
    for path, module in causal.named_modules():
        for name in ["", *(name for name, _ in module.named_parameters(recurse=False))]:
            full = ".".join(filter(None, (path, name)))
            yield from ((module, name, style) for pattern, style in patterns if pattern.fullmatch(full))


def _cut_parameters(module: nn.Module, style: str, share: Callable[[int], slice]) -> None:
    """Cut the parameters of a linear layer. What holds experts has a plan for each parameter."""
    if style in DIMS:
        for name, _ in list(module.named_parameters(recurse=False)):
            _cut_parameter(module, name, style, share)


def _cut_parameter(module: nn.Module, name: str, style: str, share: Callable[[int], slice]) -> None:
    whole: Tensor = getattr(module, name).detach()
    dim, num_packed = DIMS[style]
    dim = max(0, whole.ndim + dim)  # a bias has outputs alone
    parts = [
        packed.narrow(dim, part.start, part.stop - part.start)
        for packed in whole.chunk(num_packed, dim)
        for part in [share(packed.shape[dim])]
    ]
    setattr(module, name, nn.Parameter(torch.cat(parts, dim), requires_grad=False))


def _without_bias(module: Any) -> Tensor | None:
    """Take a layer's bias away, which is added behind the sum."""
    bias, module.bias = module.bias, None
    return bias


def _summed(collectives: Collectives, bias: Tensor | None) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: Any, part: Tensor) -> Tensor:
        del module, args
        total = collectives.sum_partial(part.flatten(0, -2)).view_as(part)
        return total if bias is None else total + bias

    return hook


def _gathered(collectives: Collectives) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: Any, part: Tensor) -> Tensor:
        del module, args
        return collectives.gather_logits(part.flatten(0, -2)).unflatten(0, part.shape[:-1])

    return hook
