"""One log for every process of the cluster, as text or as one JSON object a line. Request ids are in it; secrets never are."""

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal

from cluster.ingress import request_context
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
_ALWAYS = (
    "cluster.ingress.api.audit",
    "cluster.ingress.api.live_rules",
    "cluster.instance.instance",
    "engine.execution.step_graphs",
    "engine.execution.warm_up",
)
"""Loggers that log at any level: refused requests, changes of the rules, how an instance has started, and what keeps one on a GPU
from it for long."""


def configure_logging(level: str, form: Literal["text", "json"] = "text") -> None:
    """Send Baton's own loggers to stderr at `level`. Raises ConfigError for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"unknown log level {level!r}: use debug, info, warning or error")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(number)
        logger.propagate = False
    for name in _ALWAYS:
        logging.getLogger(name).setLevel(logging.INFO)


class JsonFormatter(logging.Formatter):
    """Writes one JSON object a line. `request_id` is there while a request is being served, and `audit` has what `extra={"audit":
    {...}}` carries."""

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
        if audit := record.__dict__.get("audit"):
            line["audit"] = audit
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
