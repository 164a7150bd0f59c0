"""Every scheduler that the goodput studies run, by name, with the kind of fleet it is made for.

A baseline's name may be followed by what it is given beside its own: `+any` (every instance does either role, and computes the
prompts that it decodes), `+refuse` (Mooncake's early rejection), `+engine` (its instances compose steps as Baton's do). So
`least-loaded+any+refuse+engine` differs from Baton in nothing but the scheduler."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from core.config.cluster_config import ScheduleConfig
from core.errors import ConfigError
from sim.baselines.arrow import Arrow
from sim.baselines.dispatch import Dispatcher, Router
from sim.baselines.dynamo import Dynamo
from sim.baselines.early_rejection import EarlyRejection
from sim.baselines.least_loaded import LeastLoaded
from sim.baselines.llm_d import LlmD
from sim.baselines.mooncake import Mooncake
from sim.baselines.polyserve import PolyServe
from sim.baselines.power_of_two import PowerOfTwo
from sim.baselines.ray_affinity import RayAffinity
from sim.baselines.round_robin import RoundRobin
from sim.baselines.sarathi import Sarathi
from sim.coarse.world import Log, MakeScheduler, PlacingScheduler, production

Kind = Literal["static", "dynamic"]


@dataclass(frozen=True, slots=True)
class Entry:
    make: MakeScheduler
    kind: Kind
    """`static`: instances are split into prefill and decode in a fixed ratio; `dynamic`: any instance does either."""
    paced: bool = False
    """Its instances compose steps as ours do (engine.pacing, engine.lateness); others serve prompts as they come, within
    Sarathi's budget for a step that decodes."""


def _routed(make_router: Callable[[], Router]) -> MakeScheduler:
    def make(config: ScheduleConfig, log: Log) -> PlacingScheduler:
        return Dispatcher(config, log, make_router())

    return make


def entry_of(name: str) -> Entry:
    """Return the scheduler of that name, with what the name gives it. Raises ConfigError for an unknown one."""
    base, *given = name.split("+")
    if base not in SCHEDULERS or not set(given) <= {ANY, REFUSE, ENGINE} or (base == OURS and given):
        known = ", ".join(SCHEDULERS)
        raise ConfigError(
            f"unknown scheduler {name!r}; known: {known}; all but {OURS} with +{ANY}, +{REFUSE} and +{ENGINE}"
        )
    entry = SCHEDULERS[base]
    make = _routed(lambda: EarlyRejection(_ROUTERS[base]())) if REFUSE in given else entry.make
    return Entry(make, "dynamic" if ANY in given else entry.kind, entry.paced or ENGINE in given)


OURS = "baton"
ANY, REFUSE, ENGINE = "any", "refuse", "engine"
_ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
    "least-loaded": LeastLoaded,
    "ray-affinity": RayAffinity,
    "llm-d": LlmD,
    "dynamo": Dynamo,
    "mooncake": Mooncake,
    "polyserve": PolyServe,
    "arrow": Arrow,
    "sarathi": Sarathi,
}
_DYNAMIC = {"polyserve", "arrow", "sarathi"}
SCHEDULERS: dict[str, Entry] = {OURS: Entry(production, "dynamic", paced=True)} | {
    name: Entry(_routed(make), "dynamic" if name in _DYNAMIC else "static") for name, make in _ROUTERS.items()
}
