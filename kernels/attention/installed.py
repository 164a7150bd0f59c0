"""Which of other people's attention kernels are installed here, and what a measurement of them holds for."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from core.errors import ConfigError
from kernels.attention.case import Backend
from kernels.attention.flash_attention import flash_attention_backend
from kernels.attention.flashinfer import flashinfer_backend

_PACKAGES = ("baton-serve", "torch", "triton", "flashinfer-python", "flash-attn")
INSTALL: Mapping[str, str] = {
    "flashinfer": "pip install flashinfer-python",
    "flash_attention": "pip install flash-attn --no-build-isolation",
}
_MODULES: Mapping[str, tuple[str, Callable[[Any], Backend]]] = {
    "flashinfer": ("flashinfer", flashinfer_backend),
    "flash_attention": ("flash_attn", flash_attention_backend),
}


def load_backend(name: str) -> Backend | None:
    """Return the backend, or None where it is not installed. Raises ConfigError where it is and cannot be imported."""
    module, make = _MODULES[name]
    if find_spec(module) is None:
        return None
    try:
        return make(import_module(module))
    except Exception as error:  # a library that was built for another torch may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{module} is installed and cannot be imported ({reason}): reinstall it for torch {torch.__version__}"
        ) from error


def about(device: torch.device) -> str:
    """Return the GPU and the versions of all that computes."""
    versions = ", ".join(f"{package} {_version(package)}" for package in _PACKAGES)
    return f"{torch.cuda.get_device_name(device)}, {versions}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"
