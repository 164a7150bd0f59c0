"""Makes of a GGUF file what Baton reads everywhere else: a folder with config.json, the tokenizer's files, and the weights.

The folder is in the user's cache, named by the file's place, size and time; its `model.gguf` is a link to the file."""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from core.errors import ConfigError, UnsupportedModel
from core.user_cache import user_cache
from models.files.gguf_reader import BYTES, ROPE_FACTORS, field, kept_bytes, open_gguf

_ROOT: Final = Path(__file__).parents[2]
WEIGHTS: Final = "model.gguf"
_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOKENIZER: Final = "tokenizer.ggml."
_ENDS: Final = ("eos", "eot", "eom")
"""What a file calls the ends of a text, of a turn, and of a message that calls tools."""
_FOLDER_VERSION: Final = 3
"""Grows when the folder's content does, so that a folder of an earlier release is made again."""
_LLAMA3: Final = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Llama 3.1 and 3.2 say alike; their `factor` is the largest of the file's factors."""


def folder_of_gguf(path: Path) -> Path:
    """Return the folder. Of processes that ask at once each may make it, and one's stays. Raises ConfigError and
    UnsupportedModel."""
    path = path.resolve()
    about = path.stat()
    said = hashlib.sha256(
        f"{_FOLDER_VERSION} {path} {about.st_size} {about.st_mtime_ns}".encode()
    ).hexdigest()[:16]
    folder = _cache() / f"{path.stem}-{said}"
    if folder.is_dir():
        return folder
    config = _config(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        new = Path(made) / "model"
        new.mkdir()
        _write_tokenizer(path, new)
        (new / "config.json").write_text(json.dumps(config, indent=1))
        (new / WEIGHTS).symlink_to(path)
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _cache() -> Path:
    return user_cache() / "gguf"


def _config(path: Path) -> dict[str, Any]:
    reader = open_gguf(path)
    architecture = field(reader, "general.architecture")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _check_file(path, reader, architecture, tensors)

    def get(key: str, *default: Any) -> Any:
        found = field(reader, f"{architecture}.{key}", *default)
        if found is None and not default:
            raise UnsupportedModel(f"{path.name} lacks {architecture}.{key}")
        return found

    heads, hidden = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden // heads)
    _check_layers(path, architecture, tensors, get, head_dim)
    theta, scaling = get("rope.freq_base", 10000.0), get("rope.scaling.type", "none")
    return {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "rope_parameters": _rope(path, reader, tensors, theta, scaling, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "float16",
        "quantization_config": {"quant_method": "gguf", "bytes_each": _bytes_each(tensors)},
        **_text_ends(reader),
    }


def _check_file(path: Path, reader: Any, architecture: str, tensors: dict[str, Any]) -> None:
    """Raise UnsupportedModel for another architecture, a part of a model, and tensors that cannot be read."""
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{path.name} has the architecture {architecture!r}: of GGUF {', '.join(_ARCHITECTURES)} are supported"
        )
    if int(field(reader, "split.count", 1)) > 1:
        raise UnsupportedModel(
            f"{path.name} is one of several files: join them with llama-gguf-split --merge"
        )
    for name, tensor in tensors.items():
        if tensor.tensor_type.name not in BYTES:
            raise UnsupportedModel(
                f"tensor {name!r} of {path.name} has the type {tensor.tensor_type.name}: {', '.join(BYTES)} are supported"
            )
    if "token_embd.weight" not in tensors:
        raise UnsupportedModel(f"{path.name} lacks the tensor 'token_embd.weight'")


def _check_layers(
    path: Path, architecture: str, tensors: dict[str, Any], get: Callable[..., Any], head_dim: int
) -> None:
    """Raise UnsupportedModel for layers that a dense model of this architecture has not here."""
    rotated = get("rope.dimension_count", head_dim)
    if (
        rotated != head_dim
        or get("attention.value_length", head_dim) != head_dim
        or "blk.0.ffn_gate_inp.weight" in tensors
    ):
        raise UnsupportedModel(
            f"{path.name} has experts, or heads that are rotated in part, which are not supported"
        )
    if architecture != "qwen2" and "blk.0.attn_q.bias" in tensors:
        raise UnsupportedModel(
            f"{path.name} has biases in its attention, which {architecture} files have not here"
        )


def _text_ends(reader: Any) -> dict[str, Any]:
    """Return the tokens with which texts begin and end."""
    ends = [field(reader, f"{_TOKENIZER}{name}_token_id") for name in _ENDS]
    known: dict[str, Any] = {"eos_token_id": [int(token) for token in ends if token is not None]}
    if (begin := field(reader, f"{_TOKENIZER}bos_token_id")) is not None:
        known["bos_token_id"] = begin
    return known


def _rope(
    path: Path, reader: Any, tensors: dict[str, Any], theta: float, scaling: str, head_dim: int
) -> dict[str, Any]:
    about = f"{field(reader, 'general.architecture')}.rope.scaling"
    if scaling in ("linear", "yarn"):
        scaled = {"rope_type": scaling, "factor": field(reader, f"{about}.factor"), "rope_theta": theta}
        if (original := field(reader, f"{about}.original_context_length")) is not None:
            scaled["original_max_position_embeddings"] = original
        return scaled
    if scaling != "none":
        raise UnsupportedModel(
            f"{path.name} has rope scaling {scaling!r}, which is not supported (linear and yarn are)"
        )
    if ROPE_FACTORS not in tensors:
        return {"rope_type": "default", "rope_theta": theta}
    factors = np.array(tensors[ROPE_FACTORS].data, np.float32)
    largest = float(factors.max())
    if not np.allclose(factors, llama3_factors(theta, head_dim, largest), rtol=1e-3):
        raise UnsupportedModel(f"the factors {ROPE_FACTORS!r} of {path.name} are not those of Llama 3")
    return {**_LLAMA3, "factor": largest, "rope_theta": theta}


def llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """What `rope_type: llama3` divides each frequency by (transformers' `_compute_llama3_parameters`)."""
    low, high, length = 1.0, 4.0, 8192.0
    turns = length / (2 * np.pi * np.float64(theta) ** (np.arange(0, head_dim, 2) / head_dim))
    share = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / factor + share)


def _bytes_each(tensors: dict[str, Any]) -> float:
    """Return the bytes of a number that a CPU keeps, in the mean of all matrices of the layers."""
    return kept_bytes(
        {
            name: (tensor.tensor_type.name, int(np.prod(tensor.shape)))
            for name, tensor in tensors.items()
            if name.startswith("blk.") and len(tensor.shape) == 2
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
