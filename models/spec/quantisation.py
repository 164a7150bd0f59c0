"""Reads from a config.json how its checkpoint's matrices are stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from core.errors import UnsupportedModel

_USE = "use float32, bfloat16, FP8, symmetric INT8, four bits of AWQ, or four or eight of GPTQ or packed compressed-tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How any matrix may be stored, though none has to be: a checkpoint's tensors say which are."""

    kind: Literal["scaled", "awq", "gptq", "packed", "gguf"]
    """`scaled`: FP8 or INT8 times a scale; `gguf`: each tensor of a GGUF file says it; the others have
    `bits`, as AutoAWQ, GPTQ and compressed-tensors pack them."""
    bits: Literal[4, 8] = 4
    """For all but `scaled`."""
    bytes_each: float = 0.0
    """For `gguf`, the bytes that a CPU keeps of each number of the layers' matrices."""
    is_int8: bool = False
    """For `scaled`: INT8, not FP8."""
    block: tuple[int, int] | None = None
    """For `scaled`, the rows and columns that share a scale. None means a scale for each row, or one for all."""
    group: int = 0
    """Inputs of a packed weight that share a scale; 0: all of them."""
    zero_offset: int = 0
    """The number to be added to the zero points that are stored."""
    rounds_activations: bool = False
    """For `scaled`, whether activations have as many bits as weights, in the same format, while they are multiplied."""


def read_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """Read the whole of config.json, in which a decoder's part may say it. gpt-oss's MXFP4 is read with its family. Raises
    UnsupportedModel by name."""
    asked = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not asked:
        return None
    match str(asked.get("quant_method", "unknown")):
        case "mxfp4" if config["architectures"][0] == "GptOssForCausalLM":
            return None
        case "fp8":
            return Quantisation(
                kind="scaled", block=_block(asked.get("weight_block_size")), rounds_activations=True
            )
        case "gguf":
            return Quantisation(kind="gguf", bytes_each=float(asked["bytes_each"]))
        case "awq":
            return _awq(asked)
        case "gptq":
            return _gptq(asked)
        case "compressed-tensors":
            return _compressed(asked)
        case other:
            raise _refused(other)


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
    if asked.get("sparsity_config") or asked.get("transform_config"):
        raise _refused("compressed-tensors with sparsity or transforms")
    groups = list((asked.get("config_groups") or {}).values())
    found = {
        _compressed_weights(
            group.get("weights") or {},
            group.get("input_activations") or {},
            str(group.get("format") or asked.get("format")),
        )
        for group in groups
    }
    if len(found) != 1:
        raise _refused(f"compressed-tensors with {len(found)} ways of storing weights")
    return found.pop()


def _compressed_weights(
    weights: Mapping[str, Any], activations: Mapping[str, Any], form: str
) -> Quantisation:
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    match bits, kind, strategy:
        case 4 | 8, "int", "channel" | "group" if bits == 4 or form == "pack-quantized":
            group = _group(weights["group_size"]) if strategy == "group" else 0
            return Quantisation(kind="packed", bits=bits, group=group)
        case 8, "float" | "int", "tensor" | "channel" | "block" if weights.get("symmetric", True):
            block = _block(weights["block_structure"]) if strategy == "block" else None
            alike = (activations.get("num_bits"), activations.get("type")) == (bits, kind)
            return Quantisation(
                kind="scaled",
                is_int8=kind == "int",
                block=block,
                rounds_activations=alike and activations.get("symmetric", True),
            )
        case _:
            symmetric = "" if weights.get("symmetric", True) else ", asymmetric"
            raise _refused(f"compressed-tensors, {bits} bits, {kind}, {strategy}{symmetric}")


def _block(size: Any) -> tuple[int, int] | None:
    if not size:
        return None
    rows, columns = (int(part) for part in size)
    return rows, columns


def _group(size: int) -> int:
    return max(0, int(size))


def _refused(what: str) -> UnsupportedModel:
    return UnsupportedModel(f"quantization_config ({what}) is not supported: {_USE}")
