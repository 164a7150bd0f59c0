"""What belongs to the HTTP request that the current task serves, for logging and tracing; empty elsewhere."""

from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
route: ContextVar[str] = ContextVar("route", default="")
"""The route's path, as metrics and traces tell routes apart; `/v1/batches` for a batch's lines."""
traceparent: ContextVar[str] = ContextVar("traceparent", default="")
"""W3C trace context, as the client sent it."""
