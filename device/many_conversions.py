"""Many vectors of KV, packed and stored otherwise by one launch: what `device/convert.py` does on the host, bit for bit.

A thread makes a vector: it reads it twice where the target has scales, first for its largest magnitude. CUDA C++ and not Triton,
since memory servers have no torch."""

from collections.abc import Callable

import numpy as np

from device.convert import largest_of
from device.launch_lists import LaunchLists, Numbers
from device.many_copies import Launch, launch
from device.seam import ComputeDevice, Conversion, Event

NAME = "convert_vectors"
SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;

union Bits { u32 bits; float value; };
__device__ float of_bits(u32 bits) { Bits both; both.bits = bits; return both.value; }
__device__ u32 bits_of(float value) { Bits both; both.value = value; return both.bits; }
__device__ float signed_as(u32 sign, float magnitude) { return of_bits(bits_of(magnitude) | sign); }

__device__ float from_half(u32 half) {
  const u32 sign = (half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent == 0) return signed_as(sign, (float)mantissa * 0x1p-24f);
  if (exponent == 31) return of_bits(sign | 0x7f800000 | mantissa << 13);
  return of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

__device__ float from_float8(u32 code) {
  const u32 sign = (code & 128) << 24, exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 127) == 127) return of_bits(sign | 0x7fc00000);
  if (exponent == 0) return signed_as(sign, (float)mantissa * 0x1p-9f);
  return of_bits(sign | (exponent + 120) << 23 | mantissa << 20);
}

__device__ u32 to_half(float value) {
  const u32 sign = bits_of(value) >> 16 & 0x8000;
  if (value != value) return sign | 0x7e00;
  const float magnitude = fminf(fabsf(value), 65504.0f);
  const u32 bits = bits_of(magnitude);
  if (magnitude < 0x1p-14f) return sign | (u32)rintf(magnitude * 0x1p24f);
  return sign | (((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10));
}

__device__ u32 to_bfloat16(float value) {
  const u32 bits = bits_of(value);
  return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

__device__ u32 to_float8(float value) {
  const u32 sign = bits_of(value) >> 24 & 128;
  if (value != value) return sign | 127;
  const float magnitude = fminf(fabsf(value), 448.0f);
  const u32 bits = bits_of(magnitude);
  if (magnitude < 0x1p-6f) return sign | (u32)rintf(magnitude * 0x1p9f);
  return sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

__device__ float load(u64 kind, u64 from, u64 at) {
  switch (kind) {
    case 0: return reinterpret_cast<const float *>(from)[at];
    case 1: return from_half(reinterpret_cast<const unsigned short *>(from)[at]);
    case 2: return of_bits((u32)reinterpret_cast<const unsigned short *>(from)[at] << 16);
    case 3: return from_float8(reinterpret_cast<const unsigned char *>(from)[at]);
    default: return (float)reinterpret_cast<const signed char *>(from)[at];
  }
}

__device__ void store(u64 kind, u64 to, u64 at, float value) {
  switch (kind) {
    case 0: reinterpret_cast<float *>(to)[at] = value; break;
    case 1: reinterpret_cast<unsigned short *>(to)[at] = (unsigned short)to_half(value); break;
    case 2: reinterpret_cast<unsigned short *>(to)[at] = (unsigned short)to_bfloat16(value); break;
    case 3: reinterpret_cast<unsigned char *>(to)[at] = (unsigned char)to_float8(value); break;
    default: reinterpret_cast<signed char *>(to)[at] = (signed char)fminf(fmaxf(rintf(value), -127.0f), 127.0f);
  }
}

// `how`: where vectors and their scales are, where both go (0: there are no scales), numbers of a vector, how they are stored and
// will be, and the bits of the magnitude that a vector's largest number gets.
__device__ void convert_vector(const u64 *how, u64 from, u64 to) {
  const u64 width = how[4];
  const float scale = how[1] ? reinterpret_cast<const float *>(how[1])[from] : 1.0f;
  float divisor = 1.0f;
  if (how[3]) {
    float most = 0.0f;
    for (u64 at = 0; at < width; ++at) most = fmaxf(most, fabsf(load(how[5], how[0], from * width + at) * scale));
    divisor = most / of_bits((u32)how[7]);
    if (!(divisor > 0.0f)) divisor = 1.0f;
    reinterpret_cast<float *>(how[3])[to] = divisor;
  }
  for (u64 at = 0; at < width; ++at)
    store(how[6], how[2], to * width + at, load(how[5], how[0], from * width + at) * scale / divisor);
}

// `list` has what `convert_vector` is told, then of all pieces the first vector, then where it goes, then how many there are.
extern "C" __global__ void convert_vectors(const u64 *list, u64 num_pieces) {
  const u64 *pieces = list + 8;
  for (u64 piece = blockIdx.x; piece < num_pieces; piece += gridDim.x)
    for (u64 at = threadIdx.x; at < pieces[2 * num_pieces + piece]; at += blockDim.x)
      convert_vector(list, pieces[piece] + at, pieces[num_pieces + piece] + at);
}
"""
_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "int8": 4}
_NUM_TOLD = 8
_PIECE_VECTORS = 256
_LIST_PIECES = 4096


class ManyConversions:
    """For any thread."""

    def __init__(self, device: ComputeDevice, launch: Launch) -> None:
        self._launch, self._lists = launch, LaunchLists(device, _NUM_TOLD + 3 * _LIST_PIECES)

    def convert(self, work: Conversion, stream: int, record: Callable[[], Event]) -> None:
        """Launch it on `stream`, of which `record` makes an event."""
        pieces, told = _cut(work), _told(work)
        for start in range(0, pieces.shape[1], _LIST_PIECES):
            part = pieces[:, start : start + _LIST_PIECES]
            with self._lists.filled(np.concatenate((told, part.reshape(-1))), record) as address:
                launch(self._launch, NAME, address, part.shape[1], stream)


def _cut(work: Conversion) -> Numbers:
    """Return (3, pieces): the first vector of each, where it goes, and how many there are, at most 256."""
    firsts, counts = work.runs.T
    num_pieces = -(-counts // _PIECE_VECTORS)
    numbers = np.repeat(np.arange(len(counts)), num_pieces)
    at = (
        np.arange(len(numbers)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    ) * _PIECE_VECTORS
    goes = np.cumsum(counts) - counts
    left = np.minimum(counts[numbers] - at, _PIECE_VECTORS)
    return np.stack([firsts[numbers] + at, goes[numbers] + at, left]).astype(np.uint64)


def _told(work: Conversion) -> Numbers:
    regions = (work.data, work.scales, work.packed, work.packed_scales)
    return np.array(
        [
            *(region.address if region is not None else 0 for region in regions),
            work.source.head_dim,
            _KINDS[work.source.dtype],
            _KINDS[work.target.dtype],
            int(np.float32(largest_of(work.target.dtype)).view(np.uint32)),
        ],
        np.uint64,
    )
