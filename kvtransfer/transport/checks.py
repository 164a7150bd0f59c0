"""What a holder checks of a write: its header, and the CRC-32 of its bytes, as zlib computes it (without the GIL)."""

import zlib
from collections.abc import Sequence

from core.errors import ProtocolError
from kvtransfer.copies import CopyRun


def check_header(grant_id: object, crc: object, attempt: object, *numbers: object) -> None:
    """Raise ProtocolError for a header whose fields have other types than a writer sends. Nothing of such a write may begin."""
    known = isinstance(grant_id, str) and isinstance(attempt, int) and (crc is None or isinstance(crc, int))
    if not known or not all(isinstance(each, list) and {*map(type, each)} <= {int} for each in numbers):  # type: ignore[reportUnknownArgumentType]
        raise ProtocolError("the header of a write has fields of other types")


def crc_of(pieces: Sequence[memoryview], value: int = 0) -> int:
    """Return the checksum of `pieces`, behind others whose checksum is `value`."""
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value


def source_crc(source: memoryview, runs: Sequence[CopyRun]) -> int:
    return crc_of([source[run.source : run.source + run.num_bytes] for run in runs])


def destination_crc(destination: memoryview, runs: Sequence[CopyRun]) -> int:
    return crc_of([destination[run.destination : run.destination + run.num_bytes] for run in runs])
