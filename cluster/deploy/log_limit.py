"""Bounds the log lines that strangers cause: per place in the code, and more tightly per client.

Lines beyond the bound are counted, and the next line of that place says how many were left out. Metrics count all of them."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_SITE_BURST, _SITE_PER_S = 200.0, 10.0
_CLIENT_BURST, _CLIENT_PER_S = 20.0, 0.5
_MAX_CLIENTS = 4096
"""The clients that are remembered. What was not heard of for longest is forgotten first."""


@dataclass(slots=True)
class _Allowance:
    left: float
    as_of: float


class LogLimit(logging.Filter):
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now, self._lock = now, threading.Lock()
        self._sites: dict[tuple[str, int], _Allowance] = {}
        self._clients: OrderedDict[tuple[str, int, str], _Allowance] = OrderedDict()
        self._left_out: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written. Lines for debugging always are."""
        if record.levelno < logging.INFO:
            return True
        site = (record.name, record.lineno)
        with self._lock:
            if not self._may_write(site, _client_of(record)):
                self._left_out[site] = self._left_out.get(site, 0) + 1
                return False
            record.left_out = self._left_out.pop(site, 0)
            return True

    def _may_write(self, site: tuple[str, int], client: str) -> bool:
        now = self._now()
        if client:
            known = self._clients.setdefault((*site, client), _Allowance(_CLIENT_BURST, now))
            self._clients.move_to_end((*site, client))
            if len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)
            if not _take(known, _CLIENT_BURST, _CLIENT_PER_S, now):
                return False
        return _take(
            self._sites.setdefault(site, _Allowance(_SITE_BURST, now)), _SITE_BURST, _SITE_PER_S, now
        )


def left_out_before(record: logging.LogRecord) -> int:
    """Return how many lines like this one were left out since the last that was written."""
    return getattr(record, "left_out", 0)


def _take(allowance: _Allowance, burst: float, per_s: float, now: float) -> bool:
    allowance.left = min(burst, allowance.left + (now - allowance.as_of) * per_s)
    allowance.as_of = now
    if allowance.left < 1.0:
        return False
    allowance.left -= 1.0
    return True


def _client_of(record: logging.LogRecord) -> str:
    audit = getattr(record, "audit", None)
    return str(audit.get("client", "")) if isinstance(audit, dict) else ""
