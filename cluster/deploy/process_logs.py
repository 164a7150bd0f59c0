"""One log for every process of the cluster, as text or as one JSON object a line. Request ids are in it; secrets never are."""

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal

from cluster.deploy.log_limit import LogLimit, left_out_before
from cluster.ingress.telemetry import request_context
from core.errors import ConfigError

_TEXT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_OURS = (
    "baton",
    "cluster",
    "core",
    "decode",
    "device",
    "engine",
    "kernels",
    "kvtransfer",
    "models",
    "net",
    "parallel",
    "prefill",
)
_THEIRS = ("asyncio", "python_multipart", "uvicorn.error")
"""Loggers of other people's code that writes about what clients send. Their warnings alone are written."""
_ALWAYS = (
    "cluster.ingress.http.audit",
    "cluster.ingress.tenants.live_rules",
    "cluster.instance.instance",
    "engine.execution.graphs.step_graphs",
    "engine.execution.graphs.warm_up",
    "kernels.cpu.build",
)
"""Loggers that log at any level: refused requests, changes of the rules, how an instance has started, and what keeps one from it
for long."""


def configure_logging(level: str, form: Literal["text", "json"] = "text") -> None:
    """Send Baton's own loggers to stderr at `level`. Raises ConfigError for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"unknown log level {level!r}: use debug, info, warning or error")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else _TextFormatter(_TEXT))
    handler.addFilter(LogLimit())
    for name in (*_OURS, *_THEIRS):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(number if name in _OURS else max(number, logging.WARNING))
        logger.propagate = False
    for name in _ALWAYS:
        logging.getLogger(name).setLevel(logging.INFO)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        left_out = left_out_before(record)
        return super().format(record) + (f" ({left_out} lines like this were left out)" if left_out else "")


class JsonFormatter(logging.Formatter):
    """Writes one JSON object a line. `request_id` is there while a request is being served, and `audit` has what `extra={"audit":
    {...}}` carries. `left_out` counts the lines like this one that were not written before it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if current := request_context.request_id.get():
            line["request_id"] = current
        if left_out := left_out_before(record):
            line["left_out"] = left_out
        if audit := record.__dict__.get("audit"):
            line["audit"] = audit
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
