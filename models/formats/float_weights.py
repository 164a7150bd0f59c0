"""All tensors of a quantised checkpoint as floats, under the names that its files have: for layers that transformers computes."""

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from models.formats.checkpoint import IGNORED_SUFFIXES, whole
from models.formats.matrix_ways import find_matrix, matrix_of, parts_of
from models.formats.tensor_files import TensorFiles
from models.spec.quantisation import Quantisation

_FEW_BITS: Final = ("F8_E4M3", "F8_E5M2", "I8", "U8")


def float_weights(folder: Path, how: Quantisation, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors in `dtype`. Raises UnsupportedModel for what is stored in another way than `how` says."""
    files = TensorFiles(folder)
    found: dict[str, Tensor] = {}
    parts: set[str] = set()
    for name in dict.fromkeys(map(matrix_of, files)):
        if (matrix := find_matrix(files, how, name)) is not None:
            found[name] = matrix.floats(whole(name, matrix.shape)).to(dtype)
            parts.update((name, *parts_of(name)))
    for name in files:
        if name in parts or name.endswith(IGNORED_SUFFIXES):
            continue
        if (stored := files.dtype_of(name)) in _FEW_BITS:
            raise UnsupportedModel(f"tensor {name!r} is stored as {stored}, and config.json does not say how")
        tensor = files.read(name)
        found[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    files.close()
    return found
