"""What the ranks with a model's first layer need for images: the vision tower, its largest step, and rows that are kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from core.config.cluster_config import EngineConfig
from core.cost.memory_model import RankNeeds
from core.errors import ConfigError, UnsupportedModel
from core.kv import DTYPE_BYTES
from engine.sizing.model_dims import dims_of
from models.formats.tensor_files import count_weights
from models.spec.model_spec import ModelSpec
from models.spec.vision_spec import VisionSpec
from parallel.mesh import Mesh
from parallel.plans import part_of

KEPT_ROWS: Final = 16_384
"""Rows of images that a rank keeps."""
_VECTORS = 10
"""Vectors of a patch that live at once in a tower's layer, beside an MLP's inner rows: the residual, its norm, queries, keys,
values, results, and the pixels."""


def beside_images(
    needs: Sequence[RankNeeds],
    spec: ModelSpec,
    folder: Path,
    mesh: Mesh,
    dtype: str,
    engine: EngineConfig,
) -> list[RankNeeds]:
    """Return the needs with those for images. The tower computes before the model's layers do, one image at a time. Raises
    ConfigError and UnsupportedModel."""
    if (vision := spec.vision) is None:
        return list(needs)
    _check_steps(vision, engine)
    wide, dims = DTYPE_BYTES[dtype], dims_of(spec)
    first, stop = part_of(dims, mesh, 0).layers
    if stop - first < vision.num_deep:
        raise UnsupportedModel(
            f"images of {spec.architecture} go into its first {vision.num_deep} layers, which must be on one stage: use a "
            f"smaller pp than {mesh.pp}"
        )
    weight_bytes = count_weights(folder, vision.prefixes) * wide
    patch_bytes = (_VECTORS * vision.hidden_size + 2 * vision.intermediate_size) * wide
    kept_bytes = KEPT_ROWS * spec.hidden_size * wide * (1 + vision.num_deep)
    kept_bytes += engine.max_batch_tokens * spec.hidden_size * wide * vision.num_deep
    return [
        RankNeeds(
            weight_bytes=each.weight_bytes + weight_bytes,
            step_bytes=max(each.step_bytes, vision.num_patches * patch_bytes) + kept_bytes,
        )
        if part_of(dims, mesh, rank).layers[0] == 0
        else each
        for rank, each in enumerate(needs)
    ]


def _check_steps(vision: VisionSpec, engine: EngineConfig) -> None:
    """Refuse steps without room for an image that cannot be cut, beside all that may decode. Raises ConfigError."""
    least = vision.whole_rows + engine.max_num_seqs - 1
    if vision.whole_rows and engine.max_batch_tokens < least:
        raise ConfigError(
            f"engine.max_batch_tokens is {engine.max_batch_tokens}, but a step of {vision.architecture} must have room for all "
            f"{vision.whole_rows} tokens of an image beside max_num_seqs - 1 that decode: set {least} or more, or a smaller "
            "engine.max_num_seqs"
        )
