"""What `engine.speculate` says of a draft model, and which instances have one."""

from core.config import EngineConfig


def draft_path(engine: EngineConfig) -> str:
    """Return the draft model's folder or hub id; empty where there is none."""
    return engine.speculate.partition("draft:")[2]


def engine_of_role(engine: EngineConfig, role: str) -> EngineConfig:
    """Return what an instance of this role goes by. One that only prefills has no draft model: nothing decodes there."""
    return (
        engine.model_copy(update={"speculate": "none"})
        if role == "prefill" and draft_path(engine)
        else engine
    )
