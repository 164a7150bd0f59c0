"""What models with recurrent layers cannot do, refused before a weight is read."""

from core.config.cluster_config import EngineConfig
from core.errors import ConfigError
from models.spec.kv_places import has_states
from models.spec.model_spec import ModelSpec


def check_recurrent(spec: ModelSpec, engine: EngineConfig) -> None:
    """Raise ConfigError for settings that need a state to have the same bits however a prompt is chunked, or fewer bits."""
    if has_states(spec) and engine.deterministic:
        raise ConfigError(
            f"engine.deterministic is set, but {spec.architecture} has recurrent layers, whose bits depend on how a prompt is "
            "chunked: leave it off"
        )
    if spec.cache is not None and engine.kv_dtype != "auto":
        raise ConfigError(
            f"engine.kv_dtype is {engine.kv_dtype}, but transformers attends in {spec.architecture}, which reads no 8-bit KV: "
            "use auto"
        )
    if has_states(spec) and engine.kv_dtype != "auto":
        raise ConfigError(
            f"engine.kv_dtype is {engine.kv_dtype}, but {spec.architecture} keeps recurrent states, which no kernel reads in 8 "
            "bits: use auto"
        )
