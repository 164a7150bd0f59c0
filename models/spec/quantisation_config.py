"""Reads from a checkpoint's configuration how its matrices are stored."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.errors import UnsupportedModel
from models.spec.model_spec import read_json
from models.spec.quantisation import Quantisation

_USE = (
    "use float32, bfloat16, FP8, symmetric INT8, MXFP8, MXFP4, NVFP4, four bits of AWQ, four or eight of GPTQ or packed "
    "compressed-tensors, bitsandbytes, HQQ or torchao"
)
_OWN_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which ModelOpt, AutoGPTQ and AutoAWQ say what others say in config.json, and their `quant_method`."""
_NVFP4_GROUP, _MX_GROUP = 16, 32
"""Inputs that share a scale of E4M3, and of E8M0."""
_BLOCK = 128
"""The rows and columns of ModelOpt's blocks of FP8."""
_FP8 = Quantisation(kind="scaled", rounds_activations=True)
_MXFP8 = Quantisation(kind="scaled", block=(1, _MX_GROUP))
_MXFP4 = Quantisation(kind="scaled", number="float4", block=(1, _MX_GROUP))
_NVFP4 = Quantisation(kind="scaled", number="float4", block=(1, _NVFP4_GROUP))
_MODELOPT = {
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8,
    "FP8_PB_WO": Quantisation(kind="scaled", block=(_BLOCK, _BLOCK)),
    "W8A16": Quantisation(kind="scaled", number="int8"),
    "MXFP8": _MXFP8,
    "MXFP4": _MXFP4,
    "W4A16_MXFP4": _MXFP4,
    "W4A8_MXFP4_FP8": _MXFP4,
    "W4A8_MXFP4_MXFP8": _MXFP4,
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}
"""By `quant_algo`. Those with a `pre_quant_scale`, by which activations would be multiplied first, are not among them."""
_HQQ_BITS = (1, 2, 3, 4, 8)
_TORCHAO = (
    "Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig", "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig",
    "Int4WeightOnlyConfig",
)  # fmt: skip


def with_own_file(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the `quantization_config` that some tools write into a file of its own, or call otherwise. Raises
    ConfigError."""
    if asked := _asked(config):
        return {**config, "quantization_config": asked}
    for name, method in _OWN_FILES.items():
        if (folder / name).exists():
            found = read_json(folder / name)
            own = found.get("quantization") or found
            return {**config, "quantization_config": {"quant_method": method, **own}}
    return config


def read_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """Read the whole of config.json, in which a decoder's part may say it. gpt-oss's MXFP4 is read with its family. Raises
    UnsupportedModel by name."""
    asked = _asked(config)
    if not asked:
        return None
    method = _method_of(asked)
    if method == "mxfp4" and config["architectures"][0] == "GptOssForCausalLM":
        return None
    if method not in _METHODS:
        raise _refused(method)
    return _METHODS[method]({"expert_dtype": config.get("expert_dtype"), **asked})


def _method_of(asked: Mapping[str, Any]) -> str:
    """Return the name of the tool that a `quantization_config` is of. Older files of ModelOpt name it alone as their producer."""
    producer = (asked.get("producer") or {}).get("name")
    return str(asked.get("quant_method") or asked.get("quant_library") or producer or "unknown")


def _asked(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    text = config.get("text_config") or {}
    names = ("quantization_config", "compression_config")
    return next((part[name] for part in (config, text) for name in names if part.get(name)), None)


def _fp8(asked: Mapping[str, Any]) -> Quantisation:
    """DeepSeek-V4's experts may have four bits beside matrices of eight."""
    found, experts = replace(_FP8, block=_block(asked.get("weight_block_size"))), asked.get("expert_dtype")
    if experts not in (None, "fp8", "fp4"):
        raise _refused(f"fp8, expert_dtype {experts}")
    return replace(found, others=(_MXFP4,)) if experts == "fp4" else found


def _gguf(asked: Mapping[str, Any]) -> Quantisation:
    return Quantisation(kind="gguf", bytes_each=float(asked["bytes_each"]))


def _awq(asked: Mapping[str, Any]) -> Quantisation:
    bits, version = asked.get("bits", asked.get("w_bit")), str(asked.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or not asked.get("zero_point", True):
        raise _refused(f"awq, {bits} bits, version {version}, zero_point {asked.get('zero_point', True)}")
    return Quantisation(kind="awq", group=_group(asked.get("group_size", asked.get("q_group_size", 128))))


def _gptq(asked: Mapping[str, Any]) -> Quantisation:
    bits, form = asked.get("bits"), str(asked.get("checkpoint_format", "gptq"))
    if bits not in (4, 8) or form not in ("gptq", "gptq_v2"):
        raise _refused(f"gptq, {bits} bits, checkpoint_format {form}")
    group, offset = _group(asked.get("group_size", 128)), int(form == "gptq")
    return Quantisation(kind="gptq", bits=bits, group=group, zero_offset=offset)


def _compressed(asked: Mapping[str, Any]) -> Quantisation:
    sparsity = asked.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        structure = sparsity.get("sparsity_structure", "unstructured")
        raise _refused(f"compressed-tensors, sparsity {structure} stored as {sparsity['format']}")
    if asked.get("transform_config"):
        raise _refused("compressed-tensors with transforms")
    groups = list((asked.get("config_groups") or {}).values())
    if not groups:
        raise _refused("compressed-tensors with no config_groups")
    return _together(
        _compressed_weights(
            group.get("weights") or {},
            group.get("input_activations") or {},
            str(group.get("format") or asked.get("format")),
        )
        for group in groups
    )


def _compressed_weights(
    weights: Mapping[str, Any], activations: Mapping[str, Any], form: str
) -> Quantisation:
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    symmetric = weights.get("symmetric", True)
    match bits, kind, strategy:
        case _ if form.endswith("24") or form.startswith("sparse"):
            raise _refused(f"compressed-tensors, 2:4 sparsity stored as {form}")
        case 4 | 8, "int", "channel" | "group" if bits == 4 or form == "pack-quantized":
            group = _group(weights["group_size"]) if strategy == "group" else 0
            return Quantisation(kind="packed", bits=bits, group=group)
        case 4, "float", "group" | "tensor_group" if symmetric and weights.get("group_size"):
            return replace(_NVFP4, block=(1, int(weights["group_size"])))
        case 8, "float" | "int", "tensor" | "channel" | "block" | "group" if symmetric:
            alike = (activations.get("num_bits"), activations.get("type")) == (bits, kind)
            by_groups = {"block": weights.get("block_structure"), "group": (1, weights.get("group_size"))}
            return Quantisation(
                kind="scaled",
                number="int8" if kind == "int" else "float8",
                block=_block(by_groups.get(strategy)),
                rounds_activations=alike and activations.get("symmetric", True),
            )
        case _:
            asymmetric = "" if symmetric else ", asymmetric"
            raise _refused(f"compressed-tensors, {bits} bits, {kind}, {strategy}{asymmetric}")


def _modelopt(asked: Mapping[str, Any]) -> Quantisation | None:
    algorithm = asked.get("quant_algo")
    if algorithm is None:
        return None
    layers = [asked]
    if str(algorithm).upper() == "MIXED_PRECISION":
        layers = list((asked.get("quantized_layers") or {}).values())
    if not layers:
        raise _refused("modelopt, MIXED_PRECISION without quantized_layers")
    return _together(map(_modelopt_weights, layers))


def _modelopt_weights(layer: Mapping[str, Any]) -> Quantisation:
    algorithm = str(layer.get("quant_algo")).upper()
    found = _MODELOPT.get(algorithm)
    if found is None:
        raise _refused(f"modelopt, quant_algo {algorithm}; {', '.join(_MODELOPT)} are")
    size = layer.get("group_size")
    return replace(found, block=(1, int(size))) if size and found.block and found.block[0] == 1 else found


def _quark(asked: Mapping[str, Any]) -> Quantisation:
    parts = [asked.get("global_quant_config") or {}]
    for name in ("layer_quant_config", "layer_type_quant_config"):
        parts += (asked.get(name) or {}).values()
    found = [part for part in parts if part.get("weight")]
    if not found:
        raise _refused("quark without weights")
    return _together(_quark_weights(part["weight"], part.get("input_tensors") or {}) for part in found)


def _quark_weights(weights: Any, activations: Any) -> Quantisation:
    if not isinstance(weights, dict):
        raise _refused("quark, weights in several stages")
    kind, scheme, form = (weights.get(key) for key in ("dtype", "qscheme", "scale_format"))
    match kind, scheme:
        case "fp8_e4m3", "per_tensor" | "per_channel":
            alike = isinstance(activations, dict) and activations.get("dtype") == kind
            return replace(_FP8, rounds_activations=alike)
        case "fp4", "per_group" if form == "e8m0":
            return replace(_MXFP4, block=(1, int(weights["group_size"])))
        case _:
            raise _refused(f"quark, {kind}, {scheme}, scale_format {form}")


def _bitsandbytes(asked: Mapping[str, Any]) -> Quantisation:
    return Quantisation(kind="bitsandbytes", bits=8 if asked.get("load_in_8bit") else 4)


def _hqq(asked: Mapping[str, Any]) -> Quantisation:
    said = asked.get("quant_config") or {}
    parts = [said] if "weight_quant_params" in said else list(said.values())
    for part in parts:
        bits = (part.get("weight_quant_params") or {}).get("nbits")
        if bits not in _HQQ_BITS:
            raise _refused(f"hqq, {bits} bits; {', '.join(map(str, _HQQ_BITS))} are")
        if part.get("scale_quant_params") or part.get("zero_quant_params"):
            raise _refused("hqq with quantised scales or zeros")
    return Quantisation(kind="hqq")


def _torchao(asked: Mapping[str, Any]) -> Quantisation:
    for name in _torchao_types(asked.get("quant_type")):
        if name not in _TORCHAO:
            raise _refused(f"torchao, {name}; {', '.join(_TORCHAO)} are")
    return Quantisation(kind="torchao")


def _torchao_types(said: Any) -> list[str]:
    """Return the names of all configurations that one consists of."""
    if not isinstance(said, dict):
        return [str(said)]
    said = said.get("default", said)
    data = said.get("_data") or {}
    inner = data.get("fqn_to_config") or data.get("module_fqn_to_config")
    if inner:
        return [name for each in inner.values() if each for name in _torchao_types(each)]
    return [str(said.get("_type"))]


def _together(ways: Iterable[Quantisation]) -> Quantisation:
    """Return one description of all ways. Of those that differ in their activations alone none rounds them, since a tensor does
    not say which of them it is."""
    found: dict[Quantisation, bool] = {}
    for way in ways:
        plain = replace(way, rounds_activations=False)
        found[plain] = found.get(plain, True) and way.rounds_activations
    first, *others = (replace(way, rounds_activations=rounds) for way, rounds in found.items())
    return replace(first, others=tuple(others))


def _block(size: Any) -> tuple[int, int] | None:
    if not size:
        return None
    rows, columns = (int(part) for part in size)
    return rows, columns


def _group(size: int) -> int:
    return max(0, int(size))


def _refused(what: str) -> UnsupportedModel:
    return UnsupportedModel(f"quantization_config ({what}) is not supported: {_USE}")


_METHODS: dict[str, Callable[[Mapping[str, Any]], Quantisation | None]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "gguf": _gguf,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "quark": _quark,
    "bitsandbytes": _bitsandbytes,
    "hqq": _hqq,
    "torchao": _torchao,
}
"""By `quant_method`."""
