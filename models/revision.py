"""Names the weights in a folder by a few letters, without reading them all."""

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 1 << 16


def weights_revision(folder: Path) -> str:
    """Return a name that is equal for equal checkpoints, whatever their folder is called, and (all but surely) different for
    different weights.

    It is made from the configuration, and of each safetensors file its size, its beginning (the names and shapes of tensors), its
    middle and its end: a model that was trained further differs everywhere."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(at)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
