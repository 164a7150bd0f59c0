"""Names packed weights by all that their content depends on."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import torch

from kernels.cpu.build import library_path
from kernels.cpu.library import allowed_sets, fastest_exact, fastest_of_bfloat16, fastest_of_bytes
from models.files.revision import weights_revision

_CODE: Final = ("kernels", "models", "parallel")
"""The packages that read, cut and pack weights."""
_DESCRIPTIONS: Final = ("*config.json", "*.index.json")
"""Some tools write how weights are stored into a file of their own, such as hf_quant_config.json."""


@runtime_checkable
class NamedCut(Protocol):
    """A `Shard` that names what it cuts out: equal names, equal cuts."""

    @property
    def identity(self) -> str: ...


def weights_key(folder: Path, *said: object) -> str:
    """Return a name for the weights of a checkpoint as these kernels pack them. `said`: what else their content depends on. Needs
    native kernels."""
    isas = *allowed_sets(), fastest_exact(), fastest_of_bytes(), fastest_of_bfloat16()
    described = [
        (path.name, path.read_bytes()) for kind in _DESCRIPTIONS for path in sorted(folder.glob(kind))
    ]
    parts = described, _files_of(folder), weights_revision(folder), _code(), torch.__version__, isas, said
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def weights_bytes(folder: Path) -> int:
    """Return the size of a checkpoint's files."""
    return sum(path.stat().st_size for path in _weights(folder))


def _files_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return each file's name, size and time of its last change, which a revision, made from samples, can miss."""
    found = [(path.name, path.stat()) for path in _weights(folder)]
    return sorted((name, status.st_size, status.st_mtime_ns) for name, status in found)


def _weights(folder: Path) -> list[Path]:
    return [path for kind in ("*.safetensors", "*.gguf") for path in folder.glob(kind)]


@cache
def _code() -> str:
    digest, root = hashlib.blake2b(library_path().read_bytes()), Path(__file__).parents[2]
    for path in sorted(path for name in _CODE for path in (root / name).rglob("*.py")):
        digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
