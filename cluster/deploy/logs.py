"""One log format for every process of the cluster. Request ids are in the messages; secrets never are."""

import logging

from core.errors import ConfigError

_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_OURS = ("baton", "cluster", "core", "decode", "engine", "kvtransfer", "models", "net", "parallel", "prefill")


def configure_logging(level: str) -> None:
    """Send Baton's own loggers to stderr at `level`. Raises ConfigError for an unknown level."""
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"unknown log level {level!r}: use debug, info, warning or error")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(number)
        logger.propagate = False
