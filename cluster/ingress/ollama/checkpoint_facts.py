"""What a checkpoint's files say of it, for Ollama's lists of models."""

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import safe_open

from models.files.revision import weights_revision

_LEVELS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True)
class CheckpointFacts:
    """Nothing is known where `folder` is None. The files are read when a fact is first asked for."""

    folder: Path | None

    @cached_property
    def revision(self) -> str:
        return "" if self.folder is None else weights_revision(self.folder)

    @cached_property
    def size(self) -> int:
        """The weights' bytes."""
        return sum(path.stat().st_size for path in self._weights)

    @cached_property
    def modified_at(self) -> datetime:
        latest = max((path.stat().st_mtime for path in self._weights), default=0.0)
        return datetime.fromtimestamp(latest, UTC)

    @cached_property
    def family(self) -> str:
        return str(self._config.get("model_type", ""))

    @cached_property
    def format(self) -> str:
        return self._weights[0].suffix.removeprefix(".") if self._weights else ""

    @cached_property
    def level(self) -> str:
        """How numbers are stored, as Ollama writes it."""
        if (quantization := self._config.get("quantization_config")) is not None:
            return str(quantization.get("quant_method", "")).upper()
        dtype = str(self._config.get("dtype") or self._config.get("torch_dtype") or "")
        return _LEVELS.get(dtype, dtype.upper())

    @cached_property
    def num_parameters(self) -> int:
        """The parameters; 0 where they are packed, so that shapes do not tell their number."""
        if self.format != "safetensors" or "quantization_config" in self._config:
            return 0
        return sum(map(_num_elements, self._weights))

    @property
    def parameter_size(self) -> str:
        return next(
            (
                f"{self.num_parameters / unit:.1f}{name}"
                for unit, name in _UNITS
                if self.num_parameters >= unit
            ),
            "",
        )

    def digest(self, more: str = "") -> str:
        """Return a name of the weights, with `more` of an adapter's."""
        return sha256(f"{self.revision}\n{more}".encode()).hexdigest()

    @cached_property
    def _weights(self) -> list[Path]:
        folder = self.folder
        return [] if folder is None else sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])

    @cached_property
    def _config(self) -> dict[str, Any]:
        file = None if self.folder is None else self.folder / "config.json"
        return json.loads(file.read_bytes()) if file is not None and file.exists() else {}


def _num_elements(file: Path) -> int:
    with safe_open(file, framework="numpy") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
