"""An adapter's description: which modules it has matrices for, of which rank. No weight is read for it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from core.config.adapter_config import adapter_key
from core.errors import ConfigError, UnsupportedModel
from models.files.hub import folder_of
from models.files.revision import weights_revision
from models.files.tensor_names import decoders_name
from models.lora.peft_config import NAME as CONFIG
from models.lora.peft_config import PeftConfig, read_peft_config
from models.lora.targets import Targets, targets_of
from models.spec.model_spec import ModelSpec

FILE = "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.(?:default\.)?weight")


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """The two matrices beside one module. The product of both is multiplied with `scale`."""

    a: str
    """The name of (rank, inputs) in the file."""
    b: str
    """The name of (outputs, rank)."""
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    key: str
    """Its name and its revision, as requests carry it."""
    folder: str
    pairs: Mapping[str, LowRankPair]
    """By the module's name in the model's checkpoint."""

    @property
    def file(self) -> Path:
        return Path(self.folder, FILE)


def read_adapters(paths: Mapping[str, str], spec: ModelSpec) -> tuple[Adapter, ...]:
    """Read the descriptions, by the names and folders that the configuration gives. Raises ConfigError and UnsupportedModel."""
    if not paths:
        return ()
    targets = targets_of(spec)
    return tuple(_read(name, _folder(name, path), targets) for name, path in paths.items())


def read_within(name: str, path: str, folders: Sequence[str], max_rank: int, spec: ModelSpec) -> Adapter:
    """Read the description of an adapter that lies in one of `folders`, wherever links lead, and return it. Raises ConfigError
    and UnsupportedModel."""
    folder = _within(name, path, folders)
    adapter = _read(name, folder, targets_of(spec))
    if (largest := max(pair.rank for pair in adapter.pairs.values())) > max_rank:
        raise UnsupportedModel(
            f"adapter {name!r}: it has a rank of {largest}, and adapters.max_rank is {max_rank}"
        )
    return adapter


def _within(name: str, path: str, folders: Sequence[str]) -> Path:
    """Return the folder, without links. Nothing is said of what is outside of `folders`, not even whether it is there."""
    if not folders:
        raise ConfigError(f"adapter {name!r}: adapters.folders names no folder to load it from")
    roots, folder = [Path(each).resolve() for each in folders], Path(path)
    places = [folder, folder / FILE, folder / CONFIG]
    if not folder.is_absolute() or not all(_is_in(place.resolve(), roots) for place in places):
        raise ConfigError(
            f"adapter {name!r}: {path} is not in one of adapters.folders, which are {', '.join(folders)}: give a whole path there"
        )
    if not folder.is_dir():
        raise ConfigError(f"adapter {name!r}: there is no folder {path}")
    return folder.resolve()


def _is_in(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _folder(name: str, path: str) -> Path:
    try:
        folder = folder_of(path)
    except ConfigError:
        folder = None
    if folder is None:
        raise ConfigError(f"adapter {name!r}: there is no folder {path}")
    return folder


def _read(name: str, folder: Path, targets: Targets) -> Adapter:
    config, shapes = read_peft_config(name, folder), _shapes(name, folder)
    sides: dict[str, dict[str, str]] = {}
    for tensor in shapes:
        found = _TENSOR.fullmatch(tensor)
        module = _module(found["module"]) if found is not None else ""
        if found is None or module not in targets:
            known = sorted({target.rpartition(".")[2] for target in targets})
            raise UnsupportedModel(
                f"adapter {name!r}: {folder / FILE} has the tensor {tensor!r}, which is not supported: of this model "
                f"{', '.join(known)} are, and none of a mixture's experts"
            )
        sides.setdefault(module, {})[found["side"]] = tensor
    if not sides:
        raise UnsupportedModel(f"adapter {name!r}: {folder / FILE} has no tensors")
    pairs = {module: _pair(name, config, module, own, shapes, targets) for module, own in sides.items()}
    return Adapter(adapter_key(name, weights_revision(folder)), str(folder), pairs)


def _module(name: str) -> str:
    return decoders_name(name, is_headless=name.startswith("layers."))


def _pair(
    name: str,
    config: PeftConfig,
    module: str,
    sides: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    targets: Targets,
) -> LowRankPair:
    (outputs, inputs), rank = targets[module], config.rank(module)
    for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
        if side not in sides:
            raise UnsupportedModel(f"adapter {name!r}: {FILE} lacks lora_{side} of {module}")
        if shapes[sides[side]] != shape:
            raise UnsupportedModel(
                f"adapter {name!r}: tensor {sides[side]!r} is {shapes[sides[side]]}; the model and the adapter's rank ask for "
                f"{shape}"
            )
    return LowRankPair(sides["A"], sides["B"], rank, config.scale(module))


def _shapes(name: str, folder: Path) -> dict[str, tuple[int, ...]]:
    with open_adapter(name, folder / FILE, "np") as file:  # an ingress, which reads these, has no torch
        return {tensor: tuple(file.get_slice(tensor).get_shape()) for tensor in file.keys()}  # noqa: SIM118


def open_adapter(name: str, path: Path, framework: Literal["np", "pt"] = "pt") -> Any:
    """Open an adapter's file, for a `with` block. `framework`: whose tensors it gives. Raises ConfigError."""
    try:
        return safe_open(path, framework, device="cpu")
    except FileNotFoundError:
        raise ConfigError(f"adapter {name!r}: there is no {path} (safetensors only)") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"adapter {name!r}: cannot read {path}: {error} (an incomplete download?)"
        ) from None
