"""The same work by other people's kernels, where they are installed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.attention.case import Backend, Case
from kernels.attention.installed import INSTALL, load_backend
from kernels.attention.trial import Lens, make_step, run

Load = Callable[[str], Backend | None]


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Callable[[], object]:
    """q (B, H, L, D), k and v (B, Hkv, L', D), contiguous: torch chooses the backend."""
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def paged(
    case: Case, lens: Lens, device: torch.device, load: Load = load_backend
) -> dict[str, Callable[[], object]]:
    """Return the kernels that attend over Baton's own pool, by the adapters that serve, with the least blocks that each is able
    to do."""
    runs: dict[str, Callable[[], object]] = {}
    for name in INSTALL:
        if (backend := load(name)) is None:
            continue
        for block_size in (case.block_size, 256):
            shape = replace(case, block_size=block_size)
            if not backend.cannot(shape):
                step = make_step(shape, lens, device)
                runs[f"{name}, blocks of {block_size}"] = partial(run, backend.attend, step, shape)
                break
    return runs
