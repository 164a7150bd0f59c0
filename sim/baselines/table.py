"""Every scheduler that the goodput study runs, by name, with the kind of fleet it is made for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from core.config import ScheduleConfig
from sim.baselines.arrow import Arrow
from sim.baselines.dispatch import Dispatcher, Router
from sim.baselines.dynamo import Dynamo
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


OURS = "baton"
SCHEDULERS: dict[str, Entry] = {
    OURS: Entry(production, "dynamic", paced=True),
    "round-robin": Entry(_routed(RoundRobin), "static"),
    "power-of-two": Entry(_routed(PowerOfTwo), "static"),
    "least-loaded": Entry(_routed(LeastLoaded), "static"),
    "ray-affinity": Entry(_routed(RayAffinity), "static"),
    "llm-d": Entry(_routed(LlmD), "static"),
    "dynamo": Entry(_routed(Dynamo), "static"),
    "mooncake": Entry(_routed(Mooncake), "static"),
    "polyserve": Entry(_routed(PolyServe), "dynamic"),
    "arrow": Entry(_routed(Arrow), "dynamic"),
    "sarathi": Entry(_routed(Sarathi), "dynamic"),
}
