"""What instances keep of an answer whose client has come back."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from core.stream_messages import KeptSequence, StreamFound
from core.types import Request, Resumption


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStream:
    begun_at: int
    digest: bytes
    record: bytes
    sequences: Mapping[str, tuple[str, KeptSequence]]
    """By request, the address of the instance that has its last attempt, and that attempt."""

    def resumed(self, request: Request, resumption: Resumption) -> Request:
        """Return the request that goes on with what is kept of it."""
        if (found := self.sequences.get(request.id)) is None:
            return replace(request, resumption=resumption)
        address, kept = found
        resumption = replace(resumption, past=kept.tokens, held_by=address if kept.runs else "")
        return replace(request, attempt=kept.attempt, resumption=resumption)


def kept_stream(answers: Iterable[tuple[str, StreamFound]]) -> KeptStream | None:
    """Return a stream from what instances, by address, have found of it; None where that is nothing."""
    found = [(address, answer) for address, answer in answers if answer.sequences]
    if not found:
        return None
    sequences: dict[str, tuple[str, KeptSequence]] = {}
    for address, answer in found:
        for one in answer.sequences:
            if one.request_id not in sequences or sequences[one.request_id][1].attempt < one.attempt:
                sequences[one.request_id] = address, one
    first = found[0][1]
    record = next((answer.record for _, answer in found if answer.record), b"")
    return KeptStream(begun_at=first.begun_at, digest=first.digest, record=record, sequences=sequences)
