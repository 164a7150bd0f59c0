"""Names the weights in a folder by a few letters, without reading them all."""

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 1 << 16
_NAMES = ("config.json", "adapter_config.json", "*.safetensors", "*.gguf")


def weights_revision(folder: Path) -> str:
    """Return a name that is equal for equal checkpoints, whatever their folder is called, and (all but surely) different for
    different weights.

    It is made from the configuration, which may be an adapter's, and of each file of weights its size, its beginning (the names
    and shapes of tensors), its middle and its end: a model that was trained further differs everywhere."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for name in _NAMES for path in folder.glob(name)):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                file.seek(at)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
