"""How large steps are where the configuration does not say it: more on a GPU than on a CPU."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from pydantic import BaseModel

E = TypeVar("E", bound=BaseModel)
GPU_BATCH_TOKENS, GPU_NUM_SEQS = 8192, 512
"""By these `baton plan` and `baton simulate` model GPUs."""
_GPU_STEPS: Final = {"max_batch_tokens": GPU_BATCH_TOKENS, "max_num_seqs": GPU_NUM_SEQS}


def with_steps_of_device(engine: Any, validated: Callable[[Any], E]) -> E:
    """Return the section of the keys of `engine`. Where `device` is cuda, sizes of steps that are not set get a GPU's values, and
    still count as not set: another device may be said later."""
    if not isinstance(engine, dict) or engine.get("device") != "cuda":
        return validated(engine)
    made = validated(_GPU_STEPS | engine)
    made.model_fields_set.difference_update(_GPU_STEPS.keys() - engine.keys())
    return made
