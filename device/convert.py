"""KV vectors from one storage dtype into another, on the sending side, without torch: what a device's kernel does
(`device/many_conversions.py`), on the host.

Floats are rounded to nearest, ties to even; 8-bit storage with scales gets one scale for each vector or group of its numbers, the
largest magnitude over the dtype's, and without scales saturates. Invariant: converting there and back changes an element by at
most half a step of the coarser storage."""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from core.kv import KVLayout
from device.seam import Conversion, Region

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

FP8_MAX = 448.0
INT8_MAX = 127.0
_FP8_TINY = 2.0**-6
"""The smallest normal number of float8_e4m3fn. Below it numbers are 2**-9 apart."""


def convert(
    source: KVLayout, data: Bytes, scales: Floats | None, target: KVLayout
) -> tuple[Bytes, Floats | None]:
    """Return vectors stored as `source` stores them, `data` (n * vector bytes,) and `scales` (n * scales of a vector,) if it has
    any, as `target` stores them."""
    values = _values(source, data, scales)
    if target.scales == "none":
        return _STORE[target.dtype](values).view(np.uint8).reshape(-1), None
    first, end = target.kept
    scaled = np.delete(values, np.s_[first:end], axis=1).reshape(-1, target.group or target.head_dim)
    new_scales = np.abs(scaled).max(axis=1) / np.float32(largest_of(target.dtype))
    new_scales = np.where(new_scales > 0, new_scales, np.float32(1)).astype(np.float32)
    stored = _STORE[target.dtype](scaled / new_scales[:, None]).view(np.uint8).reshape(len(values), -1)
    if target.num_kept:
        kept = _store_bfloat16(values[:, first:end]).view(np.uint8)
        stored = np.concatenate((stored[:, :first], kept, stored[:, first:]), axis=1)
    return stored.reshape(-1), new_scales


def _values(source: KVLayout, data: Bytes, scales: Floats | None) -> Floats:
    """Return (n, head_dim)."""
    if scales is None:
        return _LOAD[source.dtype](data).reshape(-1, source.head_dim)
    if not source.num_kept:
        return _scaled(source, data, scales)
    first, last = source.kept[0], 2 * source.kept[1] - source.kept[0]
    rows = data.reshape(-1, source.vector_bytes)
    kept = _load_bfloat16(np.ascontiguousarray(rows[:, first:last]))
    numbers = _scaled(source, np.delete(rows, np.s_[first:last], axis=1), scales)
    return np.concatenate((numbers[:, :first], kept, numbers[:, first:]), axis=1)


def _scaled(source: KVLayout, data: Bytes, scales: Floats) -> Floats:
    """Return (n, numbers with a scale)."""
    numbers = _LOAD[source.dtype](data).reshape(len(scales), -1) * scales[:, None]
    return numbers.reshape(-1, source.head_dim - source.num_kept)


def convert_regions(work: Conversion, bytes_of: Callable[[Region], Bytes]) -> None:
    """Do what is asked of a device, in memory whose bytes `bytes_of` gives."""

    def joined(regions: Iterable[Region]) -> Bytes:
        return np.concatenate([bytes_of(region) for region in regions])

    scales = joined(work.scale_parts()).view(np.float32) if work.scales is not None else None
    data, new_scales = convert(work.source, joined(work.data_parts()), scales, work.target)
    bytes_of(work.packed)[:] = data
    if work.packed_scales is not None:
        assert new_scales is not None
        bytes_of(work.packed_scales)[:] = new_scales.view(np.uint8)


def largest_of(dtype: str) -> float:
    """Return the magnitude that a vector's largest number has in storage with scales."""
    return _LARGEST.get(dtype, 1.0)


def _load_bfloat16(data: Bytes) -> Floats:
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _store_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _fp8_table() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    value[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -value, value).astype(np.float32)


_FP8 = _fp8_table()


def _store_fp8(values: Floats) -> Bytes:
    """Round to float8_e4m3fn; numbers beyond ±448 become ±448."""
    magnitude = np.minimum(np.nan_to_num(np.abs(values), nan=0.0, posinf=FP8_MAX), np.float32(FP8_MAX))
    bits = np.ascontiguousarray(magnitude, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    normal = rounded.astype(np.int32) - ((127 - 7) << 3)
    small = np.rint(magnitude * np.float32(2.0**9)).astype(np.int32)
    code = np.where(magnitude < _FP8_TINY, small, normal)
    code = np.where(np.isnan(values), 127, np.minimum(code, 126))
    return (code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def _store_int8(values: Floats) -> npt.NDArray[np.int8]:
    return np.clip(np.rint(values), -INT8_MAX, INT8_MAX).astype(np.int8)


def _store_float16(values: Floats) -> npt.NDArray[np.float16]:
    limit = np.float32(65504)
    return np.clip(values, -limit, limit).astype(np.float16)


_LARGEST = {"float8_e4m3fn": FP8_MAX, "int8": INT8_MAX}
_LOAD: dict[str, Callable[[Bytes], Floats]] = {
    "float32": lambda data: data.view(np.float32),
    "float16": lambda data: data.view(np.float16).astype(np.float32),
    "bfloat16": _load_bfloat16,
    "float8_e4m3fn": lambda data: _FP8[data],
    "int8": lambda data: data.view(np.int8).astype(np.float32),
}
_STORE: dict[str, Callable[[Floats], npt.NDArray[np.generic]]] = {
    "float32": lambda values: np.ascontiguousarray(values, np.float32),
    "float16": _store_float16,
    "bfloat16": _store_bfloat16,
    "float8_e4m3fn": _store_fp8,
    "int8": _store_int8,
}
