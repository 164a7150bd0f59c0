"""Selects what computes attention on a GPU, as `engine.kernels` says."""

import logging
from collections.abc import Callable, Sequence

from core.errors import ConfigError
from kernels.attention.case import Attend, Backend, Case
from kernels.attention.choosing import Chooser
from kernels.attention.installed import INSTALL, load_backend

_log = logging.getLogger(__name__)


def select_attention(
    wanted: str,
    cases: Sequence[Case],
    current: Backend,
    chooser: Chooser,
    load: Callable[[str], Backend | None] = load_backend,
) -> Attend:
    """Return `current`'s attention, unless another is forced, or `wanted` is auto and others are installed; then the fastest is
    taken. `load` is as `load_backend`. Raises ConfigError where what is forced is absent, unable or wrong."""
    if wanted in INSTALL:
        if not cases:
            raise ConfigError(
                f"engine.kernels is {wanted}, which has no latent attention, nor any over parts of a pool; use auto or triton"
            )
        if (backend := load(wanted)) is None:
            raise ConfigError(f"engine.kernels is {wanted}, but it is not installed: {INSTALL[wanted]}")
        return chooser.force(cases, backend)
    if wanted != "auto" or not cases:
        return current.attend
    others: list[Backend] = []
    for name in INSTALL:
        try:
            others.extend(filter(None, [load(name)]))
        except ConfigError as error:
            _log.warning("%s", error)
    return chooser.choose(cases, current, others) if others else current.attend
