"""What adapters need of each rank's memory, beside the model: from their descriptions alone."""

from collections.abc import Sequence
from dataclasses import replace

from core.config.adapter_config import AdapterConfig
from core.cost.memory_model import RankNeeds
from core.kv import DTYPE_BYTES
from engine.sizing.model_dims import dims_of, rules_of
from models.lora.adapter import Adapter
from models.lora.targets import targets_of
from models.spec.model_spec import ModelSpec
from parallel.mesh import Mesh
from parallel.rules import Sharding

_FLOAT = 4


def with_adapters(
    needs: Sequence[RankNeeds],
    adapters: Sequence[Adapter],
    spec: ModelSpec,
    mesh: Mesh,
    *,
    slots: AdapterConfig,
    dtype: str,
    max_batch_tokens: int,
) -> list[RankNeeds]:
    """Return the needs of each rank with those of the adapters, whose matrices have the `dtype` that the model computes in. A
    slot is as large as an adapter of the largest rank beside every module. Raises UnsupportedModel."""
    if not adapters and not slots.num_slots:
        return list(needs)
    wide, found = DTYPE_BYTES[dtype], list[RankNeeds]()
    for rank, need in enumerate(needs):
        sharding = Sharding(dims_of(spec), mesh, rank, rules_of(spec))
        sizes = _held_sizes(spec, sharding)
        numbers = sum(
            pair.rank * sum(sizes[module])
            for adapter in adapters
            for module, pair in adapter.pairs.items()
            if module in sizes
        )
        numbers += slots.num_slots * slots.max_rank * sum(map(sum, sizes.values()))
        # One module's products are made at a time. They need the rows' outputs, the rows themselves, and these as floats where
        # they were rounded.
        widest = max(
            (outputs * wide + inputs * (wide + _FLOAT) for outputs, inputs in sizes.values()), default=0
        )
        found.append(
            replace(
                need,
                weight_bytes=need.weight_bytes + numbers * wide,
                step_bytes=need.step_bytes + max_batch_tokens * widest,
            )
        )
    return found


def _held_sizes(spec: ModelSpec, sharding: Sharding) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of a rank's part of each module that may have an adapter."""
    prefixes = tuple(f"model.layers.{layer}." for layer in range(*sharding.part.layers))
    return {
        module: _sizes(sharding, module, shape)
        for module, shape in targets_of(spec).items()
        if module.startswith(prefixes)
    }


def _sizes(sharding: Sharding, module: str, shape: tuple[int, int]) -> tuple[int, int]:
    outputs, inputs = (
        sum(run.stop - run.start for run in runs) for runs in sharding(f"{module}.weight", shape)
    )
    return outputs, inputs
