"""Loads a model: description first, weights last, so that what cannot work is said before any weight is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from core.start_timer import StartTimer
from kernels.collectives import ONE_RANK, Collectives
from kernels.cpu.attention import attends_heads_of
from kernels.cpu.library import fastest_of_bfloat16, native
from kernels.cpu.prepacked import WeightFormat
from kernels.ops import Ops
from kernels.select import Kernels, select_ops
from models.causal_model import CausalModel
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, Shard, whole
from models.formats.dummy_weights import DummyWeights
from models.formats.rounded_matrix import (
    NEEDED,
    Scheme,
    WeightRounding,
    rounding_of_experts,
    rounding_of_model,
)
from models.formats.shared_weights import SharedWeights
from models.layers.attention_cases import attention_cases
from models.lora.adapter import Adapter, read_adapters
from models.lora.low_rank import AdapterWeights
from models.model import Model
from models.pooling.readout import Readout, load_readout
from models.spec.model_spec import DTYPES, Implementation, LoadFormat, ModelSpec

Quantization = Literal["none", "fp8", "int8", "int4", "nvfp4"]
"""`ModelConfig.quantization`."""
Encode = Callable[[Sequence[Tensor], Sequence[int]], list[Tensor]]
"""`models.hf.encoder_model.EncoderModel.encode`."""


def choose_dtype(spec: ModelSpec, wanted: str, device: torch.device) -> str:
    """Return the dtype. `auto` means float32 on CPUs, elsewhere the checkpoint's own. Raises UnsupportedModel."""
    if wanted == "auto":
        wanted = "float32" if device.type == "cpu" else spec.dtype
    if wanted not in DTYPES:
        raise UnsupportedModel(f"dtype {wanted!r} is not supported ({', '.join(DTYPES)} are)")
    return wanted


def choose_weights(
    spec: ModelSpec, wanted: str, quantization: Quantization, device: torch.device, *, deterministic: bool
) -> WeightFormat:
    """Return how ranks keep matrices of a model whose `dtype` is `wanted`. With `auto` a CPU keeps those of a 16-bit checkpoint
    in 16 bits, and those of a quantised one as they are stored, and adds up in float32. Raises UnsupportedModel."""
    if spec.implementation == "transformers" and deterministic:
        raise UnsupportedModel(
            f"transformers computes {spec.architecture}: engine.deterministic is for Baton's own architectures"
        )
    if quantization != "none":
        return _rounded(spec, quantization, device, deterministic=deterministic)
    small = spec.dtype in ("bfloat16", "float16") or spec.quantisation is not None
    halves = wanted == "auto" and small
    return "half" if halves and device.type == "cpu" and native() is not None else "full"


def _rounded(spec: ModelSpec, to: Scheme, device: torch.device, *, deterministic: bool) -> WeightFormat:
    """Return how ranks keep matrices that are rounded as the model is loaded. Raises UnsupportedModel."""
    said, on_cpu = f"model.quantization is {to}", device.type == "cpu"
    if spec.quantisation is not None:
        raise UnsupportedModel(
            f"{said}, which rounds full-precision checkpoints, and this one has few bits already: leave it at none here"
        )
    if on_cpu and native() is None:
        raise UnsupportedModel(
            f"{said}, which needs native kernels: install a wheel of baton-serve that has them, or a C++ compiler; the log says "
            "what is missing"
        )
    if deterministic and not on_cpu:
        raise UnsupportedModel(
            f"{said}, but engine.deterministic multiplies floats alone on a GPU: leave one of them out"
        )
    is_foreign = spec.implementation == "transformers" or spec.encodes
    if is_foreign and not (on_cpu and to in ("int8", "int4")):
        raise UnsupportedModel(
            f"{said}, but transformers computes {spec.architecture}, whose layers are rounded to int8 and int4 alone, on CPUs"
        )
    return to


def rounded_to(spec: ModelSpec, weights: WeightFormat, device: torch.device) -> WeightRounding | None:
    """Return what matrices are rounded to as they are read. On CPUs those of int8 and int4 are rounded as they are packed, but
    for experts'."""
    if weights in ("full", "half"):
        return None
    if device.type == "cpu" and weights in ("int8", "int4"):
        return None if spec.moe is None else rounding_of_experts(weights)
    return rounding_of_model(spec, weights)


def check_rounding(rounding: WeightRounding | None, ops: Ops, device: torch.device) -> None:
    """Raise UnsupportedModel where a GPU's kernels would multiply what was rounded as floats, which saves nothing."""
    if rounding is None or device.type == "cpu" or NEEDED[rounding.to] in ops.keeps:
        return
    fits = [each for each, kind in NEEDED.items() if kind in ops.keeps]
    raise UnsupportedModel(
        f"model.quantization is {rounding.to}, but no kernel here multiplies it: "
        + (f"use {' or '.join(fits)}" if fits else "leave engine.kernels at auto, with triton installed")
    )


def choose_kv_dtype(
    spec: ModelSpec, dtype: str, weights: WeightFormat, device: torch.device, *, deterministic: bool
) -> str:
    """Return what keys and values of a model that computes in `dtype` are stored as: bfloat16 where rows are rounded to it, or to
    less, and its products are quicker; `dtype` elsewhere."""
    rounds = weights not in ("full", "fp8") and spec.dtype == "bfloat16" and not deterministic
    is_plain = spec.mla is None and spec.kept is None and not spec.encodes
    if device.type != "cpu" or not (rounds and is_plain and attends_heads_of(spec.head_dim)):
        return dtype
    isa = fastest_of_bfloat16()
    return "bfloat16" if isa is not None and isa.rounds_rows else dtype


def check_load_format(spec: ModelSpec, load_format: LoadFormat) -> None:
    """`dummy` makes random weights where there is only a config.json: for measurements. Raises UnsupportedModel."""
    if load_format != "dummy":
        return
    if spec.implementation == "transformers":
        raise UnsupportedModel(
            f"model.load_format is dummy, but transformers computes {spec.architecture}: dummy weights are for Baton's own "
            "architectures"
        )
    if spec.vision is not None:
        raise UnsupportedModel(
            f"model.load_format is dummy, but {spec.architecture} reads images, and transformers reads its tower from files"
        )
    if spec.quantisation is not None:
        raise UnsupportedModel(
            "model.load_format is dummy, which makes full-precision weights, but config.json has a quantization_config: "
            "leave that out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is loaded: what its layers compute with, and where its weights come from."""

    kernels: Kernels = "auto"
    deterministic: bool = False
    """See `select_ops`."""
    block_size: int = 16
    """Tokens of a block of the KV pool. Attention's kernels are chosen for it."""
    kv_dtype: str = ""
    """What the KV pool stores; empty: the dtype that the model computes in."""
    weights: WeightFormat = "full"
    """See `choose_weights`."""
    implementation: Implementation = "auto"
    """See `read_spec`."""
    load_format: LoadFormat = "auto"
    """See `check_load_format`."""
    max_context_tokens: int = 0
    """The tokens of the longest sequence that is served; 0: as many as the model was made for."""
    taps: tuple[int, ...] = ()
    """See `Model`."""
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    """See `read_adapters`."""
    packed_cache: str = "none"
    """Where a CPU's packed weights are shared: `auto`, `none`, or a folder (`ModelConfig.packed_cache`)."""


_DEFAULTS = LoadOptions()


@torch.inference_mode()
def load_model(
    folder: Path,
    dtype: str,
    device: torch.device,
    shard: Shard = whole,
    *,
    options: LoadOptions = _DEFAULTS,
    layers: range | None = None,
    collectives: Collectives = ONE_RANK,
    timer: StartTimer | None = None,
) -> CausalModel:
    """Load the model, or what `shard` and `layers` say of it is this rank's. `timer` hears of the phases `kernels`, `reading` and
    `packing`, of bytes read, and of `imports` and `checking` where transformers computes the layers.

    Raises ConfigError and UnsupportedModel."""
    timer = timer or StartTimer("kernels")
    timer.begin("kernels")
    spec, adapters = _described(folder, options)
    chosen = choose_dtype(spec, dtype, device)
    if spec.implementation == "transformers":
        return _foreign(
            folder, spec, chosen, device, layers, options=options, timer=timer, collectives=collectives
        )
    return _own(
        folder,
        spec,
        adapters,
        chosen,
        device,
        shard,
        options=options,
        layers=layers,
        collectives=collectives,
        timer=timer,
    )


def _own(
    folder: Path,
    spec: ModelSpec,
    adapters: Sequence[Adapter],
    dtype: str,
    device: torch.device,
    shard: Shard,
    *,
    options: LoadOptions,
    layers: range | None,
    collectives: Collectives,
    timer: StartTimer,
) -> Model:
    """Load a model that Baton's own layers compute."""
    torch_dtype = getattr(torch, dtype)
    ops = _timed(_ops_for(spec, dtype, device, shard, layers, options=options), timer)
    timer.begin("reading")
    beside = partial(AdapterWeights, adapters, shard, torch_dtype, device)
    rounds = rounded_to(spec, options.weights, device)
    check_rounding(rounds, ops, device)
    if options.load_format == "dummy":
        source = DummyWeights.of(
            spec, ops.keeps, torch_dtype, device, shard, adapters=beside(), rounds=rounds
        )
        return Model(spec, ops, source, device, layers, collectives, taps=options.taps)
    open_checkpoint = partial(Checkpoint, folder, torch_dtype, device, shard, spec.quantisation)

    def build(own: Ops, *, reads_matrices: bool) -> Model:
        checkpoint = open_checkpoint(
            own.keeps, adapters=beside(), reads_matrices=reads_matrices, rounds=rounds
        )
        readout = load_readout(folder, device)
        model = Model(spec, own, checkpoint, device, layers, collectives, readout=readout, taps=options.taps)
        checkpoint.close()
        timer.count_read(model.bytes_read)
        return model

    said = dtype, options.weights, options.deterministic, layers or range(spec.num_layers)
    shared = None if device.type != "cpu" else SharedWeights.of(options.packed_cache, folder, shard, *said)
    return build(ops, reads_matrices=True) if shared is None else shared.load(ops, build, timer)


def _described(folder: Path, options: LoadOptions) -> tuple[ModelSpec, Sequence[Adapter]]:
    """Return what is to be loaded, before any weight is read. Raises ConfigError and UnsupportedModel."""
    spec = read_spec(folder, options.implementation)
    check_load_format(spec, options.load_format)
    adapters = read_adapters(options.adapters, spec)
    if spec.encodes:
        raise UnsupportedModel(
            f"architecture {spec.architecture!r} is an encoder: it embeds texts and does not generate"
        )
    if spec.implementation == "transformers":
        return spec, adapters
    most = options.max_context_tokens or spec.max_context_tokens
    return replace(spec, max_context_tokens=most), adapters


def _ops_for(
    spec: ModelSpec,
    dtype: str,
    device: torch.device,
    shard: Shard,
    layers: range | None,
    *,
    options: LoadOptions,
) -> Ops:
    """Return the operations with which a rank computes its part of Baton's own layers."""
    whole_range = layers or range(spec.num_layers)
    cases = attention_cases(spec, shard, whole_range, getattr(torch, dtype), options.block_size)
    kv_dtype = options.kv_dtype or dtype
    return select_ops(
        device, options.kernels, cases, kv_dtype, options.weights, deterministic=options.deterministic
    )


def _timed(ops: Ops, timer: StartTimer) -> Ops:
    return replace(
        ops,
        pack=timer.timed("packing", ops.pack),
        pack_experts=timer.timed("packing", ops.pack_experts),
    )


def _foreign(
    folder: Path,
    spec: ModelSpec,
    dtype: str,
    device: torch.device,
    layers: range | None,
    *,
    options: LoadOptions,
    timer: StartTimer,
    collectives: Collectives,
) -> CausalModel:
    """Load layers that transformers computes."""
    kv_dtype, weights, torch_dtype = options.kv_dtype or dtype, options.weights, getattr(torch, dtype)
    ops = _timed(select_ops(device, options.kernels, (), kv_dtype, weights, deterministic=False), timer)
    readout = load_readout(folder, device)
    timer.begin("imports")
    from models.hf.transformers_model import TransformersModel  # noqa: PLC0415 (seconds, which Baton's own do not need)

    timer.begin("reading")
    model = TransformersModel(
        folder,
        spec,
        ops,
        torch_dtype,
        device,
        layers or range(spec.num_layers),
        tolerance=_tolerance(torch_dtype, weights),
        readout=readout,
        collectives=collectives,
        on_read=partial(timer.begin, "checking"),
    )
    timer.count_read(model.bytes_read)
    return model


@torch.inference_mode()
def load_encoder(
    folder: Path,
    dtype: str,
    device: torch.device,
    *,
    kernels: Kernels = "auto",
    weights: WeightFormat = "full",
    timer: StartTimer | None = None,
) -> tuple[Encode, Readout]:
    """The layers of an encoder, and what follows them. `timer`: see `load_model`. Raises ConfigError and UnsupportedModel."""
    timer = timer or StartTimer("imports")
    timer.begin("imports")
    from models.hf.encoder_model import EncoderModel  # noqa: PLC0415 (seconds, which Baton's own do not need)

    timer.begin("kernels")
    spec, readout, torch_dtype = read_spec(folder), load_readout(folder, device), getattr(torch, dtype)
    ops = _timed(select_ops(device, kernels, (), dtype, weights, deterministic=False), timer)
    timer.begin("reading")
    tolerance, on_read = _tolerance(torch_dtype, weights), partial(timer.begin, "checking")
    model = EncoderModel(folder, spec, ops, torch_dtype, device, tolerance=tolerance, on_read=on_read)
    timer.count_read(model.bytes_read)
    return model.encode, readout


def _tolerance(dtype: torch.dtype, weights: WeightFormat) -> float:
    """Return the difference of logits that rounding alone makes. What a wrong model computes is much farther from the right
    one's."""
    by_bits = {"int8": 0.3, "int4": 0.8}
    if weights in by_bits:
        return by_bits[weights]
    return 1e-3 if dtype == torch.float32 and weights == "full" else 0.1
