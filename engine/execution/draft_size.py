"""What a draft model takes of a rank's memory, and what it cannot be used with: from descriptions alone, no weight is read."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from core.config import EngineConfig, ModelConfig
from core.draft_config import draft_path
from core.errors import ConfigError
from core.kv import KVShard
from core.memory_law import RankNeeds
from engine.execution.draft_model import CATCH_UP_TOKENS
from engine.execution.memory_needs import needs_of, stored_as
from kernels.torch.prepacked import WeightFormat
from models.families import read_spec
from models.hub import resolve
from models.registry import choose_dtype, choose_weights
from models.spec import ModelSpec
from models.vocabulary import check_same_vocabulary
from models.weights import count_weights
from parallel.mesh import ONE_RANK, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSize:
    folder: Path
    dtype: str
    """The dtype that it computes in."""
    weights: WeightFormat
    shard: KVShard
    """What a pool beside the target's keeps, in blocks of as many tokens."""
    needs: RankNeeds

    def beside(self, target: RankNeeds) -> RankNeeds:
        """Return the needs of a rank with both models, which take turns."""
        return replace(
            target,
            weight_bytes=target.weight_bytes + self.needs.weight_bytes,
            step_bytes=max(target.step_bytes, self.needs.step_bytes),
        )


def size_draft(
    target: ModelSpec,
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    mesh: Mesh,
    *,
    role: str,
    device: torch.device,
) -> DraftSize | None:
    """Return the size of the draft model that `engine.speculate` asks for beside the `target` in `folder`, if it does. Raises
    ConfigError where they cannot be used together."""
    path = draft_path(engine)
    if not path:
        return None
    _check_target(target, engine, mesh, role)
    draft_folder = resolve(path)
    spec = read_spec(draft_folder)
    _check_draft(spec, engine)
    check_same_vocabulary(draft_folder, folder, spec.vocab_size)
    dtype = choose_dtype(spec, model.dtype, device)
    weights = choose_weights(spec, model.dtype, "none", False, device)
    needs = needs_of(
        spec,
        engine.model_copy(update={"max_batch_tokens": CATCH_UP_TOKENS}),
        ONE_RANK,
        stored_as(spec, dtype, weights, device, False),
        context_tokens=spec.max_context_tokens,
        num_weights=count_weights(draft_folder) if spec.implementation == "transformers" else 0,
    )
    return DraftSize(
        folder=draft_folder,
        dtype=dtype,
        weights=weights,
        shard=KVShard.whole(spec.kv_layout(engine.block_size, dtype)),
        needs=needs[0],
    )


def _check_target(target: ModelSpec, engine: EngineConfig, mesh: Mesh, role: str) -> None:
    asked = f"engine.speculate is {engine.speculate}, but"
    if target.encodes:
        raise ConfigError(
            f"{asked} {target.architecture} is an encoder, which draws no tokens to guess. Leave it at none"
        )
    if mesh.size > 1:
        raise ConfigError(
            f"{asked} {role} has {mesh}: a draft model serves instances of one rank. Leave {role}.tp, pp, dp and ep at 1, or "
            "guess by ngram or suffix"
        )


def _check_draft(spec: ModelSpec, engine: EngineConfig) -> None:
    if spec.encodes or spec.recurrent is not None:
        what = (
            "is an encoder" if spec.encodes else "has recurrent layers, whose state wrong guesses would spoil"
        )
        raise ConfigError(
            f"engine.speculate is {engine.speculate}, but {spec.architecture} {what}. Use a decoder whose layers all attend"
        )
