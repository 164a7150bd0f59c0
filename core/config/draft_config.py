"""What `engine.speculate` says of draft tokens that ranks make themselves, and which instances make them."""

from core.config.cluster_config import EngineConfig


def draft_path(engine: EngineConfig) -> str:
    """Return the folder or hub id of a draft model or an EAGLE-3 head; empty where there is neither."""
    return engine.speculate.partition(":")[2]


def proposes(engine: EngineConfig) -> bool:
    """Return whether ranks make draft tokens themselves, by a draft model or a head."""
    return engine.speculate == "mtp" or bool(draft_path(engine))


def engine_of_role(engine: EngineConfig, role: str) -> EngineConfig:
    """Return what an instance of this role goes by. The ranks of one that only prefills make no draft tokens: nothing decodes
    there."""
    if role == "prefill" and proposes(engine):
        return engine.model_copy(update={"speculate": "none"})
    return engine
