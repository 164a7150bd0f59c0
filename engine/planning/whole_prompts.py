"""How an encoder's instance is configured: a text is computed in one step, and nothing of it is kept."""

from core.config.cluster_config import EngineConfig
from core.errors import ConfigError

_KEEPS_KV = ("kv_bytes", "host_cache_bytes", "disk_cache_bytes")


def encoder_config(engine: EngineConfig, longest_tokens: int) -> EngineConfig:
    """`engine`, whose steps have room for the longest text. Raises ConfigError for what an encoder cannot do."""
    for name in _KEEPS_KV:
        if getattr(engine, name):
            raise ConfigError(
                f"engine.{name} is set, but this model is an encoder, which keeps no KV: leave it at 0"
            )
    if engine.kv_dtype != "auto":
        raise ConfigError(
            f"engine.kv_dtype is {engine.kv_dtype}, but this model is an encoder, which keeps no KV: leave it at auto"
        )
    most = max(engine.max_batch_tokens, longest_tokens)
    return engine.model_copy(update={"max_batch_tokens": most, "prefix_cache": False})
