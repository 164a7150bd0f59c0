"""When a model's instances sleep, and when they wake up."""

from typing import Literal

from pydantic import Field

from core.config.config_section import Section


class ResidencyConfig(Section):
    mode: Literal["always", "on_demand", "manual"] = "always"
    """`always`: the model never sleeps. `manual`: it sleeps and wakes when an operator says so. `on_demand`: it sleeps, too, when
    nobody has asked for a while, and a request wakes it."""
    idle_s: float = Field(default=300.0, gt=0)
    """With `on_demand`, the time without any request until the model sleeps."""
    least_awake_s: float = Field(default=30.0, ge=0)
    """With `on_demand`, the least time from waking up to the next sleep."""
    level: Literal[1, 2] = 1
    """With `on_demand`, what a sleeping instance keeps: 1: its weights in host memory; 2: nothing, weights are on disk."""
    keeps_kv: bool = True
    """A sleeping instance keeps its lower tiers' KV (`engine.host_cache_bytes`) for prompts that come after waking."""
    group: str = ""
    """With `on_demand`, the group of `residency_groups` whose models share memory with this one."""


class ResidencyGroup(Section):
    """Models that share memory which holds only some of them."""

    awake_models: int = Field(ge=1)
    """How many of the group's models have memory at once. The others sleep."""
