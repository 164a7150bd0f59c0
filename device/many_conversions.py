"""Many vectors of KV, packed and stored otherwise by one launch: what `device/convert.py` does on the host, bit for bit.

A thread makes a vector: it reads it twice where the target has scales, first for the largest magnitudes. CUDA C++ and not Triton,
since memory servers have no torch."""

from collections.abc import Callable

import numpy as np

from core.kv import KVLayout
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

// Where a side has a vector's number `at`: of one with scales, kept numbers take two of its places.
struct Place { u64 base, at; bool is_kept; };
__device__ Place place_of(const u64 *how, u64 base, bool has_scales, u64 vector, u64 at) {
  const u64 width = how[4], first = how[9], kept = has_scales ? how[10] : 0, begin = vector * (width + kept);
  if (at < first || !kept) return {base, begin + at, false};
  if (at < first + kept) return {base + begin + first, at - first, true};
  return {base, begin + at + kept, false};
}
__device__ float read(const u64 *how, u64 vector, u64 at) {
  const Place place = place_of(how, how[0], how[1] != 0, vector, at);
  return load(place.is_kept ? 2 : how[5], place.base, place.at);
}
__device__ void write(const u64 *how, u64 vector, u64 at, float value) {
  const Place place = place_of(how, how[2], how[3] != 0, vector, at);
  store(place.is_kept ? 2 : how[6], place.base, place.at, value);
}

// Numbers [at, end) of a vector, the `group`-th of those that share a scale.
__device__ void convert_group(const u64 *how, u64 from, u64 to, u64 group, u64 at, u64 end) {
  const u64 groups = (how[4] - how[10]) / how[8];
  const float scale = how[1] ? reinterpret_cast<const float *>(how[1])[from * groups + group] : 1.0f;
  float divisor = 1.0f;
  if (how[3]) {
    float most = 0.0f;
    for (u64 each = at; each < end; ++each) most = fmaxf(most, fabsf(read(how, from, each) * scale));
    divisor = most / of_bits((u32)how[7]);
    if (!(divisor > 0.0f)) divisor = 1.0f;
    reinterpret_cast<float *>(how[3])[to * groups + group] = divisor;
  }
  for (; at < end; ++at) write(how, to, at, read(how, from, at) * scale / divisor);
}

// `how`: where vectors and their scales are, where both go (0: there are no scales), numbers of a vector, how they are stored and
// will be, the bits of the magnitude that a group's largest number gets, the numbers of a group, and which are kept: the first,
// and how many.
__device__ void convert_vector(const u64 *how, u64 from, u64 to) {
  u64 at = 0;
  for (u64 group = 0; at < how[4]; ++group) {
    if (at == how[9])
      for (; at < how[9] + how[10]; ++at) write(how, to, at, read(how, from, at));
    if (at < how[4]) convert_group(how, from, to, group, at, at + how[8]);
    at += how[8];
  }
}

// `list` has what `convert_vector` is told, then of all pieces the first vector, then where it goes, then how many there are.
extern "C" __global__ void convert_vectors(const u64 *list, u64 num_pieces) {
  const u64 *pieces = list + 11;
  for (u64 piece = blockIdx.x; piece < num_pieces; piece += gridDim.x)
    for (u64 at = threadIdx.x; at < pieces[2 * num_pieces + piece]; at += blockDim.x)
      convert_vector(list, pieces[piece] + at, pieces[num_pieces + piece] + at);
}
"""
_KINDS = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "int8": 4}
_NUM_TOLD = 11
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
    regions, kept = (work.data, work.scales, work.packed, work.packed_scales), _kept_by(work)
    return np.array(
        [
            *(region.address if region is not None else 0 for region in regions),
            work.source.head_dim,
            _KINDS[work.source.dtype],
            _KINDS[work.target.dtype],
            int(np.float32(largest_of(work.target.dtype)).view(np.uint32)),
            (kept.head_dim - kept.num_kept) // (kept.num_scales or 1),
            kept.kept[0],
            kept.num_kept,
        ],
        np.uint64,
    )


def _kept_by(work: Conversion) -> KVLayout:
    """Return the side whose scales say which numbers share one: two with scales share them alike."""
    return work.source if work.target.scales == "none" else work.target
