"""Makes of a GGUF file what Baton reads everywhere else: a folder with config.json, the tokenizer's files, and the weights.

The folder is in the user's cache, named by the file's place, size and time; its `model.gguf` is a link to the file."""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from core.errors import ConfigError, UnsupportedModel
from core.user_cache import user_cache
from models.files.gguf_configs import config_of
from models.files.gguf_ends import text_ends
from models.files.gguf_reader import BYTES, Gguf, kept_bytes, parts_of

_ROOT: Final = Path(__file__).parents[2]
WEIGHTS: Final = "model.gguf"
_FOLDER_VERSION: Final = 3
"""Grows when the folder's content does, so that a folder of an earlier release is made again."""


def folder_of_gguf(path: Path) -> Path:
    """Return the folder. Of processes that ask at once each may make it, and one's stays. Raises ConfigError and
    UnsupportedModel."""
    parts = parts_of(path.absolute())
    path = parts[0].resolve()
    about = path.stat()
    said = hashlib.sha256(
        f"{_FOLDER_VERSION} {path} {about.st_size} {about.st_mtime_ns}".encode()
    ).hexdigest()[:16]
    folder = _cache() / f"{path.stem}-{said}"
    if folder.is_dir():
        return folder
    config = _config(parts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        new = Path(made) / "model"
        new.mkdir()
        _write_tokenizer(path, new)
        (new / "config.json").write_text(json.dumps(config, indent=1))
        for part, file in enumerate(parts):
            (new / (f"{Path(WEIGHTS).stem}-{part:05}.gguf" if part else WEIGHTS)).symlink_to(file.resolve())
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _cache() -> Path:
    return user_cache() / "gguf"


def _config(paths: list[Path]) -> dict[str, Any]:
    file = Gguf(paths)
    _check(file)
    return {
        **config_of(file),
        "quantization_config": {"quant_method": "gguf", "bytes_each": _bytes_each(file.tensors)},
        **text_ends(file.metadata),
    }


def _check(file: Gguf) -> None:
    """Raise UnsupportedModel for tensors that are missing or cannot be read."""
    for name, tensor in file.tensors.items():
        if tensor.tensor_type.name not in BYTES:
            raise UnsupportedModel(
                f"tensor {name!r} of {file.name} has the type {tensor.tensor_type.name}: {', '.join(BYTES)} are supported"
            )
    if "token_embd.weight" not in file.tensors:
        raise UnsupportedModel(f"{file.name} lacks the tensor 'token_embd.weight'")


def _bytes_each(tensors: dict[str, Any]) -> float:
    """Return the bytes of a number that a CPU keeps, in the mean of all matrices of the layers."""
    return kept_bytes(
        {
            name: (tensor.tensor_type.name, int(np.prod(tensor.shape)))
            for name, tensor in tensors.items()
            if name.startswith("blk.") and len(tensor.shape) > 1
        }
    )


def _write_tokenizer(path: Path, folder: Path) -> None:
    """Where transformers and torch are not loaded, in a process that loads them. Raises ConfigError."""
    if sys.modules.get("transformers") and sys.modules.get("torch"):
        from models.files.gguf_tokenizer import write_tokenizer  # noqa: PLC0415 (it imports transformers)

        write_tokenizer(path, folder)
        return
    command = [sys.executable, "-m", "models.files.gguf_tokenizer", str(path), str(folder)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        raise ConfigError(last[0])
