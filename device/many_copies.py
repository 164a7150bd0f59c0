"""Many short copies as one launch.

The keys and values of a sequence lie in pieces of a few kilobytes wherever two sides differ in heads or block size, or its blocks
are scattered. A device's copy engine takes microseconds to begin each of them, and so does the host that asks for it. So pieces
of one stream's copies are listed in pinned memory, and one kernel reads the list and moves them all: between a device's memory
and itself, pinned host memory, or a peer's memory that is mapped."""

from collections.abc import Callable, Sequence

import numpy as np

from core.errors import DeviceError
from device.launch_lists import LaunchLists, Numbers
from device.seam import ComputeDevice, Copy, Event

NAME = "copy_pieces"
SOURCE = r"""
typedef unsigned long long u64;
struct __align__(16) Sixteen { unsigned int words[4]; };
constexpr int LANES = 32, AT_ONCE = 8;

// A warp's part of a copy: each lane has AT_ONCE words on their way.
template <typename Word>
__device__ void copy_words(u64 to, u64 from, u64 num_bytes) {
  Word *there = reinterpret_cast<Word *>(to);
  const Word *here = reinterpret_cast<const Word *>(from);
  const u64 count = num_bytes / sizeof(Word);
  for (u64 start = threadIdx.x % LANES; start < count; start += LANES * AT_ONCE) {
    Word words[AT_ONCE];
#pragma unroll
    for (int each = 0; each < AT_ONCE; ++each)
      if (start + each * LANES < count) words[each] = here[start + each * LANES];
#pragma unroll
    for (int each = 0; each < AT_ONCE; ++each)
      if (start + each * LANES < count) there[start + each * LANES] = words[each];
  }
}

__device__ void copy_piece(u64 to, u64 from, u64 num_bytes) {
  const u64 odd = to | from | num_bytes;
  if (odd % 16 == 0) copy_words<Sixteen>(to, from, num_bytes);
  else if (odd % 4 == 0) copy_words<unsigned int>(to, from, num_bytes);
  else copy_words<unsigned char>(to, from, num_bytes);
}

// `list` has the destinations of all pieces, then their sources, then their sizes. Each warp copies some that follow each other,
// and reads about the next one meanwhile: the list is in the host's memory.
extern "C" __global__ void copy_pieces(const u64 *list, u64 num_pieces) {
  const u64 num_warps = gridDim.x * (blockDim.x / LANES), warp = threadIdx.x / LANES * gridDim.x + blockIdx.x;
  const u64 share = (num_pieces + num_warps - 1) / num_warps, start = warp * share;
  const u64 end = start + share < num_pieces ? start + share : num_pieces;
  if (start >= end) return;
  u64 to = list[start], from = list[num_pieces + start], num_bytes = list[2 * num_pieces + start];
  for (u64 piece = start; piece < end; ++piece) {
    const u64 next = piece + 1 < end ? piece + 1 : piece;
    const u64 next_to = list[next], next_from = list[num_pieces + next], next_bytes = list[2 * num_pieces + next];
    copy_piece(to, from, num_bytes);
    to = next_to;
    from = next_from;
    num_bytes = next_bytes;
  }
}
"""
THREADS = 256
MAX_PROGRAMS = 64
"""A launch takes no more of the device than so many programs of `THREADS`, since models compute meanwhile."""
MIN_COPIES = 8
MAX_MEAN_BYTES = 64 << 10
"""Copies that are fewer, or longer in the mean, are left to the copy engine, which takes nothing of the device's processors."""
_PIECE_BYTES = 16 << 10
_LIST_PIECES = 4096
_NUM_COLUMNS = 3

Launch = Callable[[int, int, Sequence[np.generic], int], object]
"""(programs, threads of each, arguments, stream): launch the kernel."""


class ManyCopies:
    """For any thread."""

    def __init__(self, device: ComputeDevice, launch: Launch) -> None:
        self._launch, self._lists = launch, LaunchLists(device, _LIST_PIECES * _NUM_COLUMNS)

    @staticmethod
    def takes(copies: Sequence[Copy]) -> bool:
        if len(copies) < MIN_COPIES:
            return False
        return sum(copy.source.num_bytes for copy in copies) <= len(copies) * MAX_MEAN_BYTES

    def copy(self, copies: Sequence[Copy], stream: int, record: Callable[[], Event]) -> None:
        """Launch copies of equal sizes on both sides on `stream`, of which `record` makes an event."""
        pieces = cut(copies)
        for start in range(0, pieces.shape[1], _LIST_PIECES):
            part = pieces[:, start : start + _LIST_PIECES]
            with self._lists.filled(part, record) as address:
                launch(self._launch, NAME, address, part.shape[1], stream)


def launch(kernel: Launch, name: str, address: np.uint64, count: int, stream: int) -> None:
    """Launch a kernel over the `count` pieces of the list at `address`. Raises DeviceError."""
    try:
        kernel(min(count, MAX_PROGRAMS), THREADS, (address, np.uint64(count)), stream)
    except RuntimeError as error:  # as cupy's errors of the driver are
        raise DeviceError(f"{name}: {error}") from error


def cut(copies: Sequence[Copy]) -> Numbers:
    """Return (3, pieces): the address that each piece goes to, the one that it comes from, and its bytes, at most 16 KiB."""
    whole = np.array(
        [(copy.destination.address, copy.source.address, copy.source.num_bytes) for copy in copies], np.uint64
    ).reshape(-1, _NUM_COLUMNS)
    num_pieces = -(-whole[:, 2].astype(np.int64) // _PIECE_BYTES)
    numbers = np.repeat(np.arange(len(whole)), num_pieces)
    first = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    at = ((np.arange(len(numbers)) - first) * _PIECE_BYTES).astype(np.uint64)
    rows = whole[numbers]
    return np.stack([rows[:, 0] + at, rows[:, 1] + at, np.minimum(rows[:, 2] - at, np.uint64(_PIECE_BYTES))])
