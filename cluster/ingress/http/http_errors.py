"""Errors in the shape that OpenAI's clients understand."""

import errno
import math
from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse

from core.errors import ModelAsleep, Overloaded, ReplicaLost, RequestError, StoreUnavailable
from core.whole_files import is_full

_MAX_TEXT = 500
"""The most characters of what a client sent that a message repeats."""
_REASONS = {408: "slow_body", 413: "body_too_long", 415: "not_json"}
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    # The SDKs of OpenAI and Anthropic try again after these, unless they are told not to. A second try would end as the first.
    409: {"x-should-retry": "false"},
    429: {"x-should-retry": "false"},
    507: {"x-should-retry": "false"},
}
"""Headers of what the client must change before it asks again, by status."""
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    if len(message) > _MAX_TEXT:
        message = message[:_MAX_TEXT] + "…"
    return {"error": {"message": message, "type": kind, "param": param and param[:_MAX_TEXT], "code": code}}


def describe(error: Exception, request_id: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers for what ended a request. What is not meant for clients stays in the log."""
    match error:
        case RequestError():
            headers = _HEADERS.get(error.status, {})
            return error.status, error_body(error.message, error.status, error.field, error.code), headers
        case Overloaded():
            after = str(max(1, math.ceil(error.retry_after_s)))
            return 429, error_body(error.message, 429, code=error.code), {"Retry-After": after}
        case ModelAsleep():
            headers = {"Retry-After": str(math.ceil(error.retry_after_s))} if error.retry_after_s else {}
            return 503, error_body(str(error), 503, code="model_asleep"), headers
        case ReplicaLost():
            return 503, error_body(str(error), 503, code="unavailable"), {"Retry-After": "1"}
        case StoreUnavailable():
            return 503, error_body(str(error), 503, code="store_unavailable"), {"Retry-After": "1"}
        case _:
            return (
                500,
                error_body(
                    f"internal error; the log has more under request {request_id}", 500, code="internal"
                ),
                {},
            )


def reason_of(error: Exception) -> str:
    """Return why a request was refused, as one of a few words, for metrics and the audit log."""
    match error:
        case RequestError():
            return error.code or _REASONS.get(error.status, "invalid_request")
        case Overloaded():
            return error.code
        case ModelAsleep():
            return "model_asleep"
        case ReplicaLost():
            return "unavailable"
        case StoreUnavailable():
            return "store_unavailable"
        case _:
            return "internal"


def as_refusal(error: Exception) -> Exception:
    """Return the error as the client gets it. A full disk becomes a 507, and no free file descriptor a 503: the server's code has
    not failed."""
    if isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR:
        return ReplicaLost("the server has as many files and connections open as it may: try again")
    if not is_full(error):
        return error
    return RequestError(
        "the server's disk is full, and nothing of this request was stored: delete files, or try again later",
        status=507,
        code="insufficient_storage",
    )


ReshapeError = Callable[[int, dict[str, Any], str], dict[str, Any]]
"""(status, OpenAI's body, request id) -> another API's body."""


def error_response(error: Exception, request_id: str, reshape: ReshapeError | None = None) -> JSONResponse:
    status, body, headers = describe(error, request_id)
    return JSONResponse(reshape(status, body, request_id) if reshape else body, status, headers)
