"""Matrices of floats rounded to fewer bits, as the tensors that a compressed-tensors checkpoint has of them.

Each number becomes the nearest one of its format, and each row, or group of a row, has the scale that its largest magnitude
asks for. Scales have the dtype of the floats, since that is what other engines make of them. NVFP4 is NVIDIA's
("Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025)."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import Kind, Weight
from kernels.packing import NVFP4_GROUP
from models.files.cuts import part_at
from models.formats.matrix_ways import find_matrix
from models.formats.stored_matrix import Cut
from models.spec.model_spec import ModelSpec
from models.spec.quantisation import Quantisation

Scheme = Literal["fp8", "int8", "int4", "nvfp4"]
Parts = dict[str, Tensor]
"""The tensors of a matrix, by what follows its module's name and a dot."""
NEEDED: Final[Mapping[Scheme, Kind]] = {"fp8": "float8", "int8": "int8", "int4": "four_bit", "nvfp4": "nvfp4"}
"""What kernels must be able to multiply."""
FLOATS: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes of what is rounded, by safetensors' names."""
_NAMES: Final = {
    torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64",
    **{dtype: name for name, dtype in FLOATS.items()},
}  # fmt: skip
OF_EXPERT: Final = re.compile(r"\bexperts\.\d+\.")
"""In the name of a tensor of one expert."""
_GROUPS: Final = (128, 64, 32)
"""Inputs that may share a scale of int4."""
_ALIGNED: Final = 16
"""What numbers of outputs and of inputs must be a multiple of, for other engines' kernels too."""
_FLOAT8, _FLOAT4, _INT8, _INT4 = 448.0, 6.0, 127.5, 7.5
"""Largest magnitudes: those of whole numbers are half their range."""
_MIDDLES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between E2M1's magnitudes. A number in the middle goes to the one with an even code."""
_PIECE: Final = 1 << 24
"""Numbers that are made float32 at one time."""


@dataclass(frozen=True, slots=True)
class WeightRounding:
    """What matrices of floats are rounded to."""

    to: Scheme
    group: int = _GROUPS[0]
    """Inputs that share a scale of int4."""
    experts_only: bool = False
    """Whether all matrices but experts' are rounded later, as they are packed."""

    @property
    def how(self) -> Quantisation:
        """Return how a checkpoint stores what `round_matrix` makes."""
        match self.to:
            case "fp8":
                return Quantisation(kind="scaled", rounds_activations=True)
            case "int8":
                return Quantisation(kind="scaled", number="int8", rounds_activations=True)
            case "int4":
                return Quantisation(kind="packed", group=self.group)
            case "nvfp4":
                return Quantisation(kind="scaled", number="float4", block=(1, NVFP4_GROUP))

    @property
    def of_tables(self) -> "WeightRounding":
        """Return what an embedding is rounded to: four bits are too few, and it has eight then."""
        is_same = self.experts_only or self.to in ("fp8", "int8")
        return self if is_same else replace(self, to="int8")

    def kept(self, keeps: frozenset[Kind]) -> frozenset[Kind]:
        """Return what stays as it was rounded, where operations keep `keeps` as it is stored."""
        return keeps | frozenset((NEEDED[self.to],)) if self.experts_only else keeps

    def of_matrix(self, name: str) -> "WeightRounding | None":
        """Return what the matrix of that name is rounded to."""
        return None if self.experts_only and not OF_EXPERT.search(name) else self

    def takes(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor is a matrix of a size that the format has."""
        aligned = len(shape) == 2 and all(size % _ALIGNED == 0 for size in shape)
        return aligned and (self.to != "int4" or shape[1] % self.group == 0)


def rounding_of_experts(to: Scheme) -> WeightRounding:
    """Return it for experts alone, with groups so small that hardly any tp cuts one."""
    return WeightRounding(to, _GROUPS[-1], experts_only=True)


def rounding_of_model(spec: ModelSpec, to: Scheme) -> WeightRounding:
    """Return it with the largest group that divides the sizes of the model's layers: not every engine reads several."""
    sizes = {spec.hidden_size, spec.num_heads * spec.head_dim, *(spec.mlp_sizes or (spec.intermediate_size,))}
    if spec.moe is not None:
        sizes |= {spec.moe.intermediate_size, spec.moe.shared_size or spec.moe.intermediate_size}
    fits = (group for group in _GROUPS if all(size % group == 0 for size in sizes))
    return WeightRounding(to, next(fits, _GROUPS[-1]))


def round_matrix(name: str, matrix: Tensor, rounding: WeightRounding, largest: Tensor | None = None) -> Parts:
    """Round (N, K) floats. `largest`: for nvfp4 the largest magnitude of all that share its overall scale; None: the matrix's
    own. Raises UnsupportedModel where a number is not finite."""
    to, largest = rounding.to, largest_of(matrix) if largest is None else largest
    if not torch.isfinite(largest):
        raise UnsupportedModel(
            f"tensor {name!r} has numbers that are not finite, and cannot be rounded to {to}"
        )
    pieces = [
        _ROUND[to](piece.float(), matrix.dtype, rounding.group, largest)
        for piece in matrix.split(max(1, _PIECE // matrix.shape[1]))
    ]
    parts = {suffix: torch.cat([piece[suffix] for piece in pieces]) for suffix in pieces[0]}
    if to == "int4":
        parts["weight_shape"] = torch.tensor(matrix.shape)
    if to == "nvfp4":
        parts["weight_global_scale"] = _overall(largest).view(1)
    return parts


def largest_of(matrix: Tensor) -> Tensor:
    """Return the largest magnitude, () float32. It is NaN where one of the numbers is."""
    return matrix.aminmax().max.maximum(-matrix.aminmax().min).float()


def round_part(
    rounding: WeightRounding,
    name: str,
    rows: Tensor,
    columns: Sequence[slice],
    keeps: frozenset[Kind],
    *,
    largest: Tensor | None = None,
) -> Weight:
    """Round whole `rows` (n, K) of the matrix `name` where they are, and return their `columns` in memory of the host: as `keeps`
    says, or as float32. Raises UnsupportedModel where a cut falls inside a group, or a number is not finite."""
    how, stem = rounding.how, name.removesuffix(".weight")
    _check_cut(rounding.to, name, columns, how.group or (how.block or (1, 1))[1])
    parts = round_matrix(name, rows, rounding, largest)
    tensors = MadeTensors({f"{stem}.{suffix}": part.cpu() for suffix, part in parts.items()})
    matrix, cut = (
        find_matrix(tensors, how, f"{stem}.weight", tuple(rows.shape)),
        [[slice(0, len(rows))], columns],
    )
    assert matrix is not None, "these are its tensors"
    kept = matrix.kept(cut, keeps)
    return matrix.floats(cut) if kept is None else kept


def _check_cut(to: Scheme, name: str, columns: Sequence[slice], group: int) -> None:
    if any(edge % group for run in columns for edge in (run.start, run.stop)):
        raise UnsupportedModel(
            f"model.quantization is {to}, of which {group} inputs share a scale, but this tp cuts tensor {name!r} between "
            f"{', '.join(f'{run.start} and {run.stop}' for run in columns)}: choose another tp, or fp8 or int8, which have a "
            "scale for each output"
        )


@dataclass(frozen=True, slots=True)
class MadeTensors:
    """See `models.formats.stored_matrix.StoredTensors`."""

    tensors: Mapping[str, Tensor]

    def dtype_of(self, name: str) -> str | None:
        return _NAMES[self.tensors[name].dtype] if name in self.tensors else None

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def note(self, name: str) -> None:
        del name

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        return self.tensors[name] if cut is None else part_at(self.tensors[name], cut)


def _float8(values: Tensor, dtype: torch.dtype, group: int, largest: Tensor) -> Parts:
    del group, largest
    scales = _scales(values.abs().amax(1, keepdim=True) / _FLOAT8, dtype)
    each = (values / scales.float()).clamp(-_FLOAT8, _FLOAT8)
    return {"weight": each.to(torch.float8_e4m3fn), "weight_scale": scales}


def _int8(values: Tensor, dtype: torch.dtype, group: int, largest: Tensor) -> Parts:
    del group, largest
    scales = _scales(values.abs().amax(1, keepdim=True) / _INT8, dtype)
    each = (values / scales.float()).round().clamp(-128, 127)
    return {"weight": each.to(torch.int8), "weight_scale": scales}


def _int4(values: Tensor, dtype: torch.dtype, group: int, largest: Tensor) -> Parts:
    del largest
    groups = values.unflatten(1, (-1, group))
    scales = _scales(groups.abs().amax(2) / _INT4, dtype)
    each = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1)
    return {"weight_packed": _pairs((each + 8).to(torch.uint8)).view(torch.int32), "weight_scale": scales}


def _nvfp4(values: Tensor, dtype: torch.dtype, group: int, largest: Tensor) -> Parts:
    del dtype, group
    overall, groups = _overall(largest), values.unflatten(1, (-1, NVFP4_GROUP))
    scales = _scales((overall * (groups.abs().amax(2) / _FLOAT4)).clamp(max=_FLOAT8), torch.float8_e4m3fn)
    each = groups / (scales.float() / overall)[..., None]
    middles = torch.tensor(_MIDDLES, device=values.device)
    middles[1::2] = middles[1::2].nextafter(torch.zeros_like(middles[1::2]))
    codes = torch.bucketize(each.abs(), middles) + 8 * each.signbit()
    return {"weight_packed": _pairs(codes.to(torch.uint8).flatten(1)), "weight_scale": scales}


_ROUND: Final[Mapping[Scheme, Callable[[Tensor, torch.dtype, int, Tensor], Parts]]] = {
    "fp8": _float8, "int8": _int8, "int4": _int4, "nvfp4": _nvfp4,
}  # fmt: skip
"""(rows (N, K) float32, dtype of scales, inputs of a group, largest magnitude of all that share an overall scale) -> parts."""


def _overall(largest: Tensor) -> Tensor:
    """Return what all scales of NVFP4 are divided by, so that the largest is near the largest that there is.

    It is a power of two: bfloat16, which some engines make of weights, then has every number that they stand for."""
    _, exponent = torch.frexp(_FLOAT8 * _FLOAT4 / largest)
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent - 1), 1.0)


def _scales(wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scales in `dtype`; 1 where all numbers are too small for one, which are rounded to 0 then."""
    scales = wanted.to(dtype)
    return torch.where(scales.float() > 0, scales.float(), 1.0).to(dtype)


def _pairs(codes: Tensor) -> Tensor:
    """(N, K) uint8 of 0..15 -> (N, K / 2), the even one in the lower half."""
    return codes[:, ::2] | codes[:, 1::2] << 4
