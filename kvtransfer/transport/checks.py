"""The checksum of KV chunks: CRC-32, as zlib computes it (without the GIL)."""

import zlib
from collections.abc import Sequence

from kvtransfer.copies import CopyRun


def crc_of(pieces: Sequence[memoryview], value: int = 0) -> int:
    """Return the checksum of `pieces`, behind others whose checksum is `value`."""
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value


def source_crc(source: memoryview, runs: Sequence[CopyRun]) -> int:
    return crc_of([source[run.source : run.source + run.num_bytes] for run in runs])


def destination_crc(destination: memoryview, runs: Sequence[CopyRun]) -> int:
    return crc_of([destination[run.destination : run.destination + run.num_bytes] for run in runs])
