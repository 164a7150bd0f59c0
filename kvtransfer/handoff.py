"""One request's hand-over from prefill to decode, seen from both sides, as two transition tables.

    decode side
    RESERVING --Reserved--> GRANTED --Complete--> ACTIVE
        |                    |  | `--WriterLost--> FENCING --Fenced--> ASKING --Assigned--> GRANTED (next epoch)
        |                    |  |                     `--Timeout--> CLOSING  `--nobody or Timeout--> LOCAL
        |                    |  `--WriterFailed-------------------------^
        |                    |--Timeout or Corrupted--> RECALLING --Drained--^
        |                    `--Cancelled--> REVOKING --Drained--> RELEASED
        `--Cancelled--> RELEASED                 `--WriterLost--> CLOSING --Fenced--> RELEASED

    prefill side
    COMPUTING --FirstToken--> SENDING --Delivered--> DONE
        `--Revoked / HolderLost / Failed--> STOPPING --Quiet--> DONE

A writer's own last word (Complete, Drained, WriterFailed) ends a fence that is still waited for. When neither comes in time the
client is sent elsewhere (CLOSING) and only the blocks go on waiting.

A fact that has no entry for the state changes nothing: late, doubled and reordered messages are harmless. Facts of an older
epoch are dropped before they get here."""

from collections.abc import Mapping
from enum import Enum, auto


class Fact(Enum):
    RESERVED = auto()
    RESERVED_LOCAL = auto()
    """The blocks are reserved, and this instance computes them itself."""
    COMPLETE = auto()
    """Every byte has arrived and the first token is known."""
    WRITER_FAILED = auto()
    WRITER_LOST = auto()
    FENCED = auto()
    DRAINED = auto()
    ASSIGNED = auto()
    NOBODY = auto()
    CANCELLED = auto()
    CORRUPTED = auto()
    """Bytes have arrived damaged."""
    TIMEOUT = auto()


class Action(Enum):
    GRANT = auto()
    REVOKE = auto()
    FENCE = auto()
    ASK = auto()
    ACTIVATE = auto()
    COMPUTE = auto()
    RELEASE = auto()
    GIVE_UP = auto()
    """Send the client elsewhere: the blocks cannot be taken back yet."""
    WITHDRAW = auto()
    """Take back a reservation that has not been served yet."""


class DecodeState(Enum):
    RESERVING = auto()
    GRANTED = auto()
    FENCING = auto()
    ASKING = auto()
    RECALLING = auto()
    REVOKING = auto()
    CLOSING = auto()
    ACTIVE = auto()
    LOCAL = auto()
    RELEASED = auto()


_D, _F, _A = DecodeState, Fact, Action
DECODE_TABLE: dict[tuple[DecodeState, Fact], tuple[DecodeState, Action | None]] = {
    (_D.RESERVING, _F.RESERVED): (_D.GRANTED, _A.GRANT),
    (_D.RESERVING, _F.RESERVED_LOCAL): (_D.LOCAL, _A.COMPUTE),
    (_D.RESERVING, _F.CANCELLED): (_D.RELEASED, _A.WITHDRAW),
    (_D.GRANTED, _F.COMPLETE): (_D.ACTIVE, _A.ACTIVATE),
    (_D.GRANTED, _F.WRITER_FAILED): (_D.ASKING, _A.ASK),
    (_D.GRANTED, _F.WRITER_LOST): (_D.FENCING, _A.FENCE),
    (_D.GRANTED, _F.TIMEOUT): (_D.RECALLING, _A.REVOKE),
    (_D.GRANTED, _F.CORRUPTED): (_D.RECALLING, _A.REVOKE),
    (_D.GRANTED, _F.CANCELLED): (_D.REVOKING, _A.REVOKE),
    (_D.FENCING, _F.FENCED): (_D.ASKING, _A.ASK),
    (_D.FENCING, _F.DRAINED): (_D.ASKING, _A.ASK),
    (_D.FENCING, _F.WRITER_FAILED): (_D.ASKING, _A.ASK),
    (_D.FENCING, _F.COMPLETE): (_D.ACTIVE, _A.ACTIVATE),
    (_D.FENCING, _F.CANCELLED): (_D.CLOSING, None),
    (_D.FENCING, _F.TIMEOUT): (_D.CLOSING, _A.GIVE_UP),
    (_D.RECALLING, _F.DRAINED): (_D.ASKING, _A.ASK),
    (_D.RECALLING, _F.WRITER_FAILED): (_D.ASKING, _A.ASK),
    (_D.RECALLING, _F.COMPLETE): (_D.ACTIVE, _A.ACTIVATE),
    (_D.RECALLING, _F.WRITER_LOST): (_D.FENCING, _A.FENCE),
    (_D.RECALLING, _F.CANCELLED): (_D.REVOKING, None),
    (_D.RECALLING, _F.TIMEOUT): (_D.FENCING, _A.FENCE),
    (_D.ASKING, _F.ASSIGNED): (_D.GRANTED, _A.GRANT),
    (_D.ASKING, _F.NOBODY): (_D.LOCAL, _A.COMPUTE),
    (_D.ASKING, _F.TIMEOUT): (_D.LOCAL, _A.COMPUTE),
    (_D.ASKING, _F.CANCELLED): (_D.RELEASED, _A.RELEASE),
    (_D.REVOKING, _F.DRAINED): (_D.RELEASED, _A.RELEASE),
    (_D.REVOKING, _F.WRITER_FAILED): (_D.RELEASED, _A.RELEASE),
    (_D.REVOKING, _F.COMPLETE): (_D.RELEASED, _A.RELEASE),
    (_D.REVOKING, _F.WRITER_LOST): (_D.CLOSING, _A.FENCE),
    (_D.REVOKING, _F.TIMEOUT): (_D.CLOSING, _A.FENCE),
    (_D.CLOSING, _F.FENCED): (_D.RELEASED, _A.RELEASE),
    (_D.CLOSING, _F.DRAINED): (_D.RELEASED, _A.RELEASE),
    (_D.CLOSING, _F.WRITER_FAILED): (_D.RELEASED, _A.RELEASE),
    (_D.CLOSING, _F.COMPLETE): (_D.RELEASED, _A.RELEASE),
}
MAY_BE_WRITTEN = frozenset({_D.GRANTED, _D.FENCING, _D.RECALLING, _D.REVOKING, _D.CLOSING})
"""The states in which somebody else may write the reserved blocks."""
DECODE_OVER = frozenset({_D.ACTIVE, _D.LOCAL, _D.RELEASED})


class DecodeHandoff:
    """The decode side of one request. `epoch` counts its grants."""

    def __init__(self) -> None:
        self.state = DecodeState.RESERVING
        self.epoch = 0

    def on(self, fact: Fact) -> Action | None:
        """Take a fact in and return the one thing to do about it, if anything."""
        entry = DECODE_TABLE.get((self.state, fact))
        if entry is None:
            return None
        if self.state is DecodeState.ASKING and entry[0] is DecodeState.GRANTED:
            self.epoch += 1
        self.state = entry[0]
        return entry[1]


class PushFact(Enum):
    FIRST_TOKEN = auto()
    DELIVERED = auto()
    """Everything is written and the Commit is sent."""
    REVOKED = auto()
    HOLDER_LOST = auto()
    FAILED = auto()
    QUIET = auto()
    """No write is in flight and none will start."""


class PushAction(Enum):
    STOP = auto()
    """Compute no more, write no more, then say Drained. A holder that seems lost is told, too, since it may only be cut off."""
    GIVE_UP = auto()
    """As STOP, but say PrefillFailed."""
    RELEASE = auto()


class PushState(Enum):
    COMPUTING = auto()
    SENDING = auto()
    STOPPING = auto()
    DONE = auto()


_P, _Q, _B = PushState, PushFact, PushAction
PUSH_TABLE: Mapping[tuple[PushState, PushFact], tuple[PushState, PushAction | None]] = {
    (_P.COMPUTING, _Q.FIRST_TOKEN): (_P.SENDING, None),
    (_P.SENDING, _Q.DELIVERED): (_P.DONE, _B.RELEASE),
    (_P.STOPPING, _Q.QUIET): (_P.DONE, _B.RELEASE),
} | {
    (state, fact): (_P.STOPPING, action)
    for state in (_P.COMPUTING, _P.SENDING)
    for fact, action in ((_Q.REVOKED, _B.STOP), (_Q.HOLDER_LOST, _B.STOP), (_Q.FAILED, _B.GIVE_UP))
}


class PushHandoff:
    """The prefill side of one request."""

    def __init__(self) -> None:
        self.state = PushState.COMPUTING

    def on(self, fact: PushFact) -> PushAction | None:
        """Take a fact in and return what is to be done. None means nothing, also where the fact means nothing in this state."""
        entry = PUSH_TABLE.get((self.state, fact))
        if entry is None:
            return None
        self.state = entry[0]
        return entry[1]
