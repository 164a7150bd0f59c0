"""What the global scheduler is told (Register, Leaving and LoadReport come as they are), and the one thing it does."""

from dataclasses import dataclass

from core.messages import (
    Buddy,
    Finished,
    Leaving,
    NeedPrefill,
    PeerRequest,
    PeersChanged,
    PlacedByPeer,
    PlaceReply,
    PlaceRequest,
    PrefillAssigned,
    Rejected,
    ReleasedByPeer,
)
from core.reports import LoadReport, Register
from core.sleep_messages import (
    AskSleep,
    AskWake,
    Asleep,
    GoToSleep,
    GroupOrder,
    KeepAwake,
    SleepAnswer,
    WakeUp,
)


@dataclass(frozen=True, slots=True)
class RequestArrived:
    frontend: str
    place: PlaceRequest


@dataclass(frozen=True, slots=True)
class PrefillNeeded:
    decode: str
    need: NeedPrefill


@dataclass(frozen=True, slots=True)
class PeerLost:
    """An instance, a frontend or another scheduler can no longer be reached."""

    address: str


@dataclass(frozen=True, slots=True)
class RequestLeft:
    """A frontend asks for a request no more. Others may, that share it (`cluster.scheduler.queue.askers`)."""

    frontend: str
    ended: Finished


@dataclass(frozen=True, slots=True)
class OperatorAsked:
    """An operator wants the model asleep, or awake."""

    frontend: str
    ask: AskSleep | AskWake


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. It is needed now and then while requests wait, or until the model may sleep."""


Event = (
    RequestArrived
    | PrefillNeeded
    | PeerLost
    | Tick
    | Finished
    | RequestLeft
    | Register
    | Leaving
    | LoadReport
    | PeersChanged
    | PlacedByPeer
    | ReleasedByPeer
    | PeerRequest
    | Asleep
    | KeepAwake
    | OperatorAsked
    | GroupOrder
)


@dataclass(frozen=True, slots=True)
class Send:
    """The only kind of action."""

    to: str
    message: (
        PlaceReply
        | Rejected
        | PrefillAssigned
        | Buddy
        | PlacedByPeer
        | ReleasedByPeer
        | PeerRequest
        | GoToSleep
        | WakeUp
        | SleepAnswer
    )
