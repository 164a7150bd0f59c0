"""A rank process' log, which its instance writes in the form and at the level of its own."""

import logging

log = logging.getLogger(__name__)

_FORM = "%(levelname)s %(name)s: %(message)s"


def log_to_instance() -> None:
    """Let this process write what it logs as lines that `log_line_of` takes apart."""
    logging.basicConfig(level=logging.INFO, format=_FORM)


def log_line_of(rank: str, line: str) -> None:
    """Log what the process `rank` has written to stderr. What no logger of Baton's has written counts as a warning: a traceback,
    or a library's complaint."""
    word, _, rest = line.partition(" ")
    level = logging.getLevelNamesMapping().get(word)
    if level is None:
        log.warning("%s: %s", rank, line)
    else:
        log.log(level, "%s: %s", rank, rest)
