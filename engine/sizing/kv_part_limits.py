"""What models cannot do of whose layers some have a part of a pool's heads, refused before a weight is read."""

from core.config.cluster_config import EngineConfig
from core.errors import ConfigError
from models.spec.model_spec import ModelSpec


def check_kv_parts(spec: ModelSpec, engine: EngineConfig) -> None:
    """Raise ConfigError for KV of 8 bits: a vector that lies in several heads of the pool would have several scales."""
    if spec.kv is None or not any(spec.kv.places) or engine.kv_dtype == "auto":
        return
    raise ConfigError(
        f"engine.kv_dtype is {engine.kv_dtype}, but layers of {spec.architecture} have KV heads of several kinds, which no "
        "kernel reads in 8 bits: use auto"
    )
