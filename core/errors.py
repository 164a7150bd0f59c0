"""One exception tree.

BatonError
|-- RequestError        the client's fault: status 400 (or its own), names the field
|   `-- TargetOutOfReach    no instance, not even an idle one, can keep the class's target: says what would be possible
|-- Overloaded          try again in `retry_after_s`
|-- ReplicaLost         an instance died or became unreachable
|   |-- ModelAsleep         all of them sleep, and will be awake in `retry_after_s`
|   `-- Hung                a rank, or the step that it computes, will not end: it is given up
|-- StoreUnavailable    the database that keeps responses, files and batches does not answer in time
|-- TransferError       a KV transfer failed; the request can be recomputed
|-- DeviceError         a GPU or its driver refused or failed
|   `-- OutOfMemory         it has no memory for what was asked, and less may fit
|-- ProtocolError       what a peer sent cannot be read: it is treated as lost
|-- ConfigError         the operator's fault: refused before anything starts
|   `-- UnsupportedModel    a model that Baton does not (fully) implement: says which part
`-- Bug                 an invariant of Baton's own is broken
"""


class BatonError(Exception):
    pass


class RequestError(BatonError):
    def __init__(
        self, message: str, *, field: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.field, self.status, self.code = message, field, status, code


class TargetOutOfReach(RequestError):
    def __init__(self, message: str, possible_ttft_s: float) -> None:
        """An idle instance would give the first token after `possible_ttft_s`."""
        super().__init__(message, status=429, code="target_out_of_reach")
        self.possible_ttft_s = possible_ttft_s


class Overloaded(BatonError):
    def __init__(self, message: str, retry_after_s: float, code: str = "overloaded") -> None:
        super().__init__(message)
        self.message, self.retry_after_s, self.code = message, retry_after_s, code


class ReplicaLost(BatonError):
    pass


class ModelAsleep(ReplicaLost):
    def __init__(self, message: str, retry_after_s: float) -> None:
        """`retry_after_s` of 0: an operator has to wake it."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDown(ReplicaLost):
    """This process ends. Another one may go on."""


class Hung(ReplicaLost):
    def __init__(self, message: str, *, runs_on: bool = False) -> None:
        """`runs_on`: the rank is a thread of this process, so it ends with the process and not before."""
        super().__init__(message)
        self.runs_on = runs_on


class StoreUnavailable(BatonError):
    pass


class TransferError(BatonError):
    pass


class DeviceError(BatonError):
    pass


class OutOfMemory(DeviceError):
    pass


class ProtocolError(BatonError):
    pass


class ConfigError(BatonError):
    pass


class UnsupportedModel(ConfigError):
    pass


class Bug(BatonError):
    pass


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; the name of its class where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that is dealt with, and of those that led to it.

    A traceback keeps all variables of its functions alive. Where one of them leads back to the error, only a full garbage
    collection frees them."""
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            left += one.__cause__, one.__context__
