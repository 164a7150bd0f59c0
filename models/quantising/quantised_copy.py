"""Writes a checkpoint with its matrices rounded, in the format of compressed-tensors, which other engines read too.

Tensors are read, rounded and written one after the other, so that memory holds one file's part of them. The folder gets its name
when it is whole."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from core.errors import ConfigError, UnsupportedModel
from models.families.table import read_spec
from models.files.hub import resolve
from models.formats.matrix_rounder import MatrixRounder
from models.formats.rounded_matrix import FLOATS, Scheme, WeightRounding, rounding_of_model
from models.formats.tensor_files import TensorFiles
from models.quantising.multiplied import multiplied_matrices
from models.spec.model_spec import ModelSpec, read_json

FILE_BYTES: Final = 2 << 30
"""Bytes of tensors with which a file is written."""
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf",
                   "*.onnx", "*.h5", "*.msgpack", ".*", "original")  # fmt: skip
"""What is not copied: the same weights in other files, and what belongs to a download."""
_FORMATS: Final[Mapping[Scheme, str]] = {
    "fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized", "nvfp4": "nvfp4-pack-quantized",
}  # fmt: skip
OnProgress = Callable[[int, int], None]
"""(bytes read so far, bytes of all tensors)"""


def write_quantised(
    model: str, to: Scheme, out: Path, on_progress: OnProgress = lambda done, whole: None
) -> int:
    """Write `model` into the new folder `out`, and return the bytes of its tensors. Raises ConfigError."""
    folder = resolve(model)
    spec = _described(folder, to)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already: choose a new folder")
    source, rounding = TensorFiles(folder, decoders=True), rounding_of_model(spec, to)
    rounded = {
        name: shape
        for name, shape in multiplied_matrices(spec, source).items()
        if source.dtype_of(name) in FLOATS and rounding.takes(shape)
    }
    if not rounded:
        raise UnsupportedModel(f"no matrix of {folder} has a size that {to} has: numbers of inputs and outputs must be "
                               "multiples of 16, and inputs of int4 of 32")  # fmt: skip
    with _becoming(out) as draft:
        num_bytes = _write_tensors(source, rounding, rounded, draft, on_progress)
        _copy_others(folder, draft)
        config = read_json(folder / "config.json")
        config["quantization_config"] = _quantization_config(source, rounding, rounded)
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    source.close()
    return num_bytes


def _described(folder: Path, to: Scheme) -> ModelSpec:
    spec = read_spec(folder)
    if spec.quantisation is not None or (spec.moe is not None and spec.moe.mxfp4):
        raise UnsupportedModel(
            f"{folder} has few bits already: quantise the full-precision checkpoint that it was made of"
        )
    if spec.implementation == "transformers" or spec.encodes:
        raise UnsupportedModel(
            f"transformers computes {spec.architecture}: its layers are not known well enough to round them to {to}"
        )
    return spec


@contextmanager
def _becoming(out: Path) -> Generator[Path]:
    """Give a folder beside `out` that becomes it at the end, and goes where an error ends the work."""
    parent = out.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.incomplete-", dir=parent))
    except OSError as error:
        raise ConfigError(f"cannot write into {parent}: {error.strerror}") from None
    try:
        yield draft
        for path in draft.rglob("*"):
            _to_disk(path)
        draft.chmod(0o755)
        draft.rename(out)
        _to_disk(parent)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {out}: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_tensors(
    source: TensorFiles,
    rounding: WeightRounding,
    rounded: Collection[str],
    draft: Path,
    on_progress: OnProgress,
) -> int:
    chosen, whole = set(rounded), sum(map(source.bytes_of, source))
    rounder = MatrixRounder(source, torch.float32, torch.device("cpu"), frozenset())
    files, done = _Files(draft), 0
    for name in source:
        own = source.stored_name(name)
        if name in chosen:
            stem = own.removesuffix(".weight")
            made = {f"{stem}.{suffix}": part for suffix, part in rounder.parts(rounding, name).items()}
        else:
            made = {own: source.read(name)}
        files.add(made)
        done += source.bytes_of(name)
        on_progress(done, whole)
    return files.finish()


class _Files:
    """Safetensors files of a folder, each written when its tensors are enough."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._names: list[list[str]] = []
        self._num_bytes = self._held_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        self._held |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._held_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._held_bytes >= FILE_BYTES:
            self._write()

    def finish(self) -> int:
        """Write the rest, name the files, and return the bytes of all tensors."""
        if self._held:
            self._write()
        count = len(self._names)
        named = [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
        final = ["model.safetensors"] if count == 1 else named
        for at, name in enumerate(final):
            self._part(at).rename(self._folder / name)
        if count > 1:
            places = {name: file for file, names in zip(final, self._names, strict=True) for name in names}
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": places}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        return self._num_bytes

    def _write(self) -> None:
        save_file(self._held, self._part(len(self._names)), {"format": "pt"})
        self._names.append(list(self._held))
        self._num_bytes += self._held_bytes
        self._held, self._held_bytes = {}, 0

    def _part(self, at: int) -> Path:
        return self._folder / f"part-{at}"


def _copy_others(folder: Path, draft: Path) -> None:
    """Copy everything but weights, and but config.json, with which a folder looks whole."""
    weights = shutil.ignore_patterns(*_WEIGHTS)

    def ignored(inside: str, names: list[str]) -> set[str]:
        return weights(inside, names) | ({"config.json"} if Path(inside) == folder else set())

    shutil.copytree(folder, draft, ignore=ignored, dirs_exist_ok=True)


def _quantization_config(
    source: TensorFiles, rounding: WeightRounding, rounded: Collection[str]
) -> dict[str, Any]:
    """Return what says how the folder's matrices are stored: all linear layers alike, but for those that are named."""
    kept = {
        source.stored_name(name).removesuffix(".weight")
        for name in source
        if name not in rounded and name.endswith(".weight") and len(source.shape_of(name)) == 2
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[rounding.to],
        "quantization_status": "compressed",
        "config_groups": {"group_0": _scheme(rounding)},
        "ignore": sorted({*kept, "lm_head"}),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


@dataclass(frozen=True, slots=True)
class _Numbers:
    bits: int
    type: str
    strategy: str
    group: int | None = None
    is_given: bool = True
    """Whether scales are stored, and not made of what is multiplied."""

    def said(self) -> dict[str, Any]:
        return {
            "num_bits": self.bits,
            "type": self.type,
            "symmetric": True,
            "strategy": self.strategy,
            "group_size": self.group,
            "dynamic": not self.is_given,
        }


def _scheme(rounding: WeightRounding) -> dict[str, Any]:
    match to := rounding.to:
        case "fp8" | "int8":
            kind = "float" if to == "fp8" else "int"
            weights, inputs = _Numbers(8, kind, "channel"), _Numbers(8, kind, "token", is_given=False)
        case "int4":
            weights, inputs = _Numbers(4, "int", "group", rounding.group), None
        case "nvfp4":
            weights, inputs = _Numbers(4, "float", "tensor_group", 16), None
    own = weights.said() | ({"scale_dtype": "torch.float8_e4m3fn"} if to == "nvfp4" else {})
    return {
        "targets": ["Linear"],
        "weights": own,
        "input_activations": None if inputs is None else inputs.said(),
        "output_activations": None,
        "format": _FORMATS[to],
    }
