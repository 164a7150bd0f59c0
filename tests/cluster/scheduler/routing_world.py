"""Short ways to make the scheduler's events, for its tests."""

import zlib

from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.scheduler_events import Event, RequestArrived, Send
from core.config.cluster_config import ScheduleConfig
from core.messages import PlaceReply, PlaceRequest, Rejected
from core.reports import LoadReport, Register
from core.types import Slo

BLOCK = 16


def instance(address: str, role: str = "d", **changes: object) -> Register:
    values: dict[str, object] = {
        "address": address,
        "incarnation": "1",
        "prefills": "p" in role,
        "decodes": "d" in role,
        "host": "h1",
        "block_size": BLOCK,
        "num_blocks": 1000,
        "max_batch_tokens": 512,
        "max_num_seqs": 16,
        "kv_token_bytes": 1024,
    }
    return Register(**{**values, **changes})  # type: ignore[arg-type]


def report(address: str, **changes: object) -> LoadReport:
    values: dict[str, object] = {
        "address": address,
        "seq": 0,
        "free_blocks": 1000,
        "waiting_tokens": 0,
        "num_waiting": 0,
        "num_running": 0,
        "tokens_per_s": 4000.0,
        "step_s": 0.02,
    }
    return LoadReport(**{**values, **changes})  # type: ignore[arg-type]


def ask(
    request_id: str,
    num_tokens: int = 400,
    max_new_tokens: int = 64,
    *,
    attempt: int = 0,
    priority: int = 0,
    ttft_s: float = 2.0,
    tenant: str = "",
    prefix: int = 0,
    exclude: tuple[str, ...] = (),
    frontend: str = "f",
) -> RequestArrived:
    """Requests with the same non-zero `prefix` share all full blocks of their prompts."""
    first = prefix * 1_000_000 or (1000 + zlib.crc32(request_id.encode())) * 1_000_000
    hashes = tuple(range(first, first + num_tokens // BLOCK))
    slo = Slo(ttft_s=ttft_s, tpot_s=0.1, priority=priority)
    place = PlaceRequest(
        request_id=request_id,
        attempt=attempt,
        num_tokens=num_tokens,
        max_new_tokens=max_new_tokens,
        block_hashes=hashes,
        slo=slo,
        exclude=exclude,
        tenant=tenant,
    )
    return RequestArrived(frontend, place)


class World:
    """A scheduler, its time, and what it has said."""

    def __init__(self, *instances: Register, **config: object) -> None:
        self.log: list[str] = []
        self.scheduler = GlobalScheduler(ScheduleConfig(**config), log=self.log.append)  # type: ignore[arg-type]
        self.now = 100.0
        for info in instances:
            self.on(info)

    def on(self, event: Event, after_s: float = 0.0) -> list[Send]:
        self.now += after_s
        return self.scheduler.on(event, self.now)

    def placed(self, event: RequestArrived) -> str:
        """`prefill>decode` or `decode`; fails when the request is not placed at once."""
        (action,) = self.on(event)
        assert isinstance(action.message, PlaceReply), action
        return route_of(action)

    def rejected(self, event: Event, after_s: float = 0.0) -> Rejected:
        (action,) = self.on(event, after_s)
        assert isinstance(action.message, Rejected), action
        return action.message


def route_of(action: Send) -> str:
    assert isinstance(action.message, PlaceReply), action
    route = action.message.route
    return f"{route.prefill}>{route.decode}" if route.prefill else route.decode
