"""Finds in which of its checkpoint's ways a matrix is stored."""

from collections.abc import Callable

from models.formats import hqq_matrix, packed_words, scaled_matrix, table_matrix, torchao_matrix
from models.formats.packed import word_matrix
from models.formats.stored_matrix import StoredMatrix, StoredTensors
from models.spec.quantisation import Quantisation

_Find = Callable[[StoredTensors, Quantisation, str, tuple[int, ...] | None], StoredMatrix | None]
_WAYS: dict[str, _Find] = {
    "scaled": scaled_matrix.scaled_matrix,
    "awq": word_matrix,
    "gptq": word_matrix,
    "packed": word_matrix,
    "bitsandbytes": table_matrix.table_matrix,
    "hqq": hqq_matrix.hqq_matrix,
    "torchao": torchao_matrix.torchao_matrix,
}
"""By `Quantisation.kind`."""
_AFTER_NAME = (*scaled_matrix.SUFFIXES, *table_matrix.SUFFIXES)
_AFTER_STEM = (
    *packed_words.SUFFIXES,
    *table_matrix.INT8_SUFFIXES,
    *hqq_matrix.SUFFIXES,
    *torchao_matrix.SUFFIXES,
)


def find_matrix(
    tensors: StoredTensors, how: Quantisation, name: str, shape: tuple[int, ...] | None = None
) -> StoredMatrix | None:
    """Return the matrix; None where it is stored in full precision. Without `shape` it is as large as its tensors say. Of ways
    whose tensors have the same names, it is the one with their shapes. Raises UnsupportedModel."""
    found = [way for each in how.ways if (way := _WAYS[each.kind](tensors, each, name, shape)) is not None]
    if len(found) < 2:
        return found[0] if found else None
    return next((way for way in found if way.fits), found[0])


def matrix_of(part: str) -> str:
    """Return the name of the matrix that a tensor of this name may be a part of."""
    for end in _AFTER_NAME:
        if part.endswith(end):
            return part.removesuffix(end)
    stem = next((part.removesuffix(f".{end}") for end in _AFTER_STEM if part.endswith(f".{end}")), None)
    return part if stem is None else f"{stem}.weight"


def parts_of(name: str) -> list[str]:
    """Return the names under which a matrix may be stored in place of, or beside, `name`."""
    stem = name.removesuffix(".weight")
    return [*(name + end for end in _AFTER_NAME), *(f"{stem}.{end}" for end in _AFTER_STEM)]
