"""How large steps are where the configuration does not say it: more on a GPU than on a CPU."""

from typing import Any

GPU_BATCH_TOKENS, GPU_NUM_SEQS = 8192, 512
"""By these `baton plan` and `baton simulate` model GPUs."""


def with_steps_of_device(engine: Any) -> Any:
    """Return the keys of `engine`. Where `device` is cuda, sizes of steps that are not set get a GPU's values."""
    if not isinstance(engine, dict) or engine.get("device") != "cuda":
        return engine
    return {"max_batch_tokens": GPU_BATCH_TOKENS, "max_num_seqs": GPU_NUM_SEQS} | engine
