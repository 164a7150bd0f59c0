"""Numbers of GGUF's types of one to three bits: each index chooses four or eight neighbours of a table, most of which have signs.

The tables are those of the package `gguf`. Functions take blocks (N, blocks, bytes) and return int8 (N, blocks, 256)."""

from functools import cache
from importlib import import_module
from typing import Any, Final

import numpy as np

from models.files.gguf_reader import library

Bytes = np.ndarray
"""of uint8"""
_SIGNS: Final = (
    (1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.int8))
    .view(np.uint64)
    .ravel()
)
"""Eight signs for each byte, as int8 in one word."""
_EVEN: Final = np.array([bits | bits.bit_count() % 2 << 7 for bits in range(128)], np.uint8)
"""The byte of signs for seven bits of it: an even number of signs is negative."""


@cache
def _table(name: str) -> np.ndarray:
    """Return a word of four or eight numbers of int8 for each index."""
    library()
    quant: Any = getattr(import_module("gguf.quants"), name)
    quant.init_grid()
    numbers = np.ascontiguousarray(quant.grid.reshape(quant.grid_shape).astype(np.int8))
    return numbers.view(f"u{quant.grid_shape[1]}").ravel()


def _numbers(name: str, indices: np.ndarray) -> np.ndarray:
    return _table(name)[indices].view(np.int8)


def _with_signs(numbers: np.ndarray, signs: Bytes) -> np.ndarray:
    """`signs`: a byte for each eight numbers."""
    return numbers * _SIGNS[signs].view(np.int8)


def _words(blocks: Bytes, at: int, end: int, dtype: type[np.unsignedinteger[Any]]) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at:end]).view(dtype)


def _parts(words: np.ndarray, shifts: tuple[int, ...], mask: int) -> np.ndarray:
    """(..., words) -> (..., words x shifts): the masked parts of each word, one after the other."""
    parts = words[..., None] >> np.array(shifts, words.dtype) & words.dtype.type(mask)
    return parts.reshape(*words.shape[:-1], -1)


def iq2_xxs(blocks: Bytes) -> np.ndarray:
    pairs = _words(blocks, 2, 66, np.uint32)
    indices = np.ascontiguousarray(pairs[..., ::2]).view(np.uint8)
    return _with_signs(_numbers("IQ2_XXS", indices), _EVEN[_parts(pairs[..., 1::2], (0, 7, 14, 21), 127)])


def iq2_xs(blocks: Bytes) -> np.ndarray:
    words = _words(blocks, 2, 66, np.uint16)
    return _with_signs(_numbers("IQ2_XS", words & np.uint16(511)), _EVEN[words >> np.uint16(9)])


def iq2_s(blocks: Bytes) -> np.ndarray:
    high = _parts(blocks[..., 66:74], (0, 2, 4, 6), 3).astype(np.uint16)
    return _with_signs(_numbers("IQ2_S", blocks[..., 2:34] | high << 8), blocks[..., 34:66])


def iq3_xxs(blocks: Bytes) -> np.ndarray:
    signs = _EVEN[_parts(_words(blocks, 66, 98, np.uint32), (0, 7, 14, 21), 127)]
    return _with_signs(_numbers("IQ3_XXS", blocks[..., 2:66]), signs)


def iq3_s(blocks: Bytes) -> np.ndarray:
    high = _parts(blocks[..., 66:74], (0, 1, 2, 3, 4, 5, 6, 7), 1).astype(np.uint16)
    return _with_signs(_numbers("IQ3_S", blocks[..., 2:66] | high << 8), blocks[..., 74:106])


def iq1_s(blocks: Bytes) -> np.ndarray:
    """Eight times what they are, since an eighth is added to each or taken off."""
    words = _words(blocks, 34, 50, np.uint16)
    indices = blocks[..., 2:34] | _parts(words, (0, 3, 6, 9), 7) << 8
    return _shifted(_numbers("IQ1_S", indices), words >> np.uint16(15))


def iq1_m(blocks: Bytes) -> np.ndarray:
    """Likewise."""
    indices = blocks[..., :32] | _parts(blocks[..., 32:48], (0, 4), 7).astype(np.uint16) << 8
    return _shifted(_numbers("IQ1_M", indices), _parts(blocks[..., 32:48], (3, 7), 1))


def _shifted(numbers: np.ndarray, is_less: np.ndarray) -> np.ndarray:
    """(..., 256) and a bit for each part of them -> 8 times the numbers, and 1 less or more."""
    parts = numbers.reshape(*is_less.shape, -1) * np.int8(8)
    return (parts + (1 - 2 * is_less.astype(np.int8))[..., None]).reshape(numbers.shape)
