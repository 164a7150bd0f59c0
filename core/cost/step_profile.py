"""The file of `baton profile`: how long steps take with one model on one machine. Simulations and new instances begin with it."""

from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.cost.steps import UNKNOWN_STEPS, StepModel, StepModels, unread_decay, with_experts
from core.errors import ConfigError
from core.kv import KVLayout


class ProfilePart(BaseModel):
    """core.cost.steps.StepModel."""

    model_config = ConfigDict(extra="forbid")
    fixed_s: float = Field(ge=0)
    token_s: float = Field(ge=0)
    context_s: float = Field(ge=0)
    seq_s: float = Field(ge=0)
    pair_s: float = Field(default=0.0, ge=0)
    error: float = Field(ge=0)
    num_steps: int = Field(ge=1)
    unread_s: float = Field(default=0.0, ge=0)
    unread_decay: float = Field(default=0.0, ge=0)

    def model(self) -> StepModel:
        return StepModel(**self.model_dump())


class Profile(BaseModel):
    """The file: one machine and model."""

    model_config = ConfigDict(extra="forbid")
    model: str
    machine: str
    decode: ProfilePart
    prompt: ProfilePart
    prompt_pair_s: float = Field(ge=0)
    num_blocks: int = Field(ge=1)
    kv_token_bytes: int = Field(ge=1)
    num_layers: int = Field(ge=1)

    @property
    def models(self) -> StepModels:
        prompt = replace(self.prompt.model(), pair_s=self.prompt_pair_s)
        return StepModels(self.decode.model(), prompt)


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError."""
    try:
        return Profile.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} is no profile of `baton profile`: {str(error).splitlines()[0]}") from None


def first_steps(
    path: str, layout: KVLayout, num_ranks: int, expert_share: float = 0.0, num_stages: int = 1
) -> StepModels:
    """Return the step times that an instance assumes before it has seen any: those of the file at `path`, or without a path
    nothing but which part of the routed experts a token uses. Raises ConfigError where the file was measured on something
    else."""
    decay = unread_decay(expert_share, num_stages)
    if not path:
        return with_experts(UNKNOWN_STEPS, decay)
    profile = read_profile(Path(path))
    measured = profile.num_layers, profile.kv_token_bytes
    if measured != (layout.num_layers, layout.token_bytes):
        raise ConfigError(
            f"engine.profile: {path} was measured on {profile.model}, with {measured[0]} layers and {measured[1]} bytes "
            f"of KV a token; this model has {layout.num_layers} and {layout.token_bytes}"
        )
    if num_ranks > 1:
        raise ConfigError(f"engine.profile: {path} was measured on one rank, not on {num_ranks}")
    return with_experts(profile.models, decay)
