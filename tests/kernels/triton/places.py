"""Whether bits can be compared: Triton's interpreter multiplies with NumPy, whose library on some processors (seen on an EPYC
without AVX-512) gives a row other last bits where it stands elsewhere in a tile. Compiled kernels do not."""

import os

import numpy as np
import pytest


def need_equal_places() -> None:
    """Skips the rest of a test where a row's product depends on its place."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    rng = np.random.default_rng(0)
    for rows, depth, width in ((16, 16, 16), (16, 64, 32), (64, 64, 64)):
        tile = rng.standard_normal((rows, depth)).astype(np.float32)
        other = rng.standard_normal((depth, width)).astype(np.float32)
        order = rng.permutation(rows)
        if not np.array_equal(tile[order] @ other, (tile @ other)[order]):
            pytest.skip("this processor's NumPy multiplies a row differently by its place in a tile")
