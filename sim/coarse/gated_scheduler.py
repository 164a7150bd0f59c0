"""A scheduler of the coarse simulation behind the limits of tenants."""

from cluster.scheduler.scheduler_events import Event, RequestArrived, Send
from core.messages import Finished, Rejected
from sim.coarse.world import PlacingScheduler
from sim.tenants import TenantGate


class GatedScheduler:
    """sim.coarse.world.PlacingScheduler: another one, behind the gate."""

    def __init__(self, scheduler: PlacingScheduler, gate: TenantGate) -> None:
        self._scheduler, self._gate = scheduler, gate
        self._running: dict[str, str] = {}
        """Tenants by the ids of their requests."""

    @property
    def num_queued(self) -> int:
        return self._scheduler.num_queued

    def on(self, event: Event, now: float) -> list[Send]:
        match event:
            case RequestArrived(frontend, place):
                excess = self._gate.begin(place.tenant, place.num_tokens, now)
                if excess is not None:
                    refusal = Rejected(place.request_id, place.attempt, excess.reason, excess.retry_after_s)
                    return [Send(frontend, refusal)]
                self._running[place.request_id] = place.tenant
            case Finished(request_id, _, num_output_tokens):
                self._end(request_id, num_output_tokens, now)
            case _:
                pass
        sends = self._scheduler.on(event, now)
        for send in sends:
            if isinstance(send.message, Rejected):
                self._end(send.message.request_id, 0, now)
        return sends

    def _end(self, request_id: str, num_output_tokens: int, now: float) -> None:
        tenant = self._running.pop(request_id)
        self._gate.spend(tenant, num_output_tokens, now)
        self._gate.end(tenant)
