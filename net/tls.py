"""TLS between Baton's processes: version 1.3, both sides verified against the cluster's certificate authority.

The authority comes from files, or from a secret that both sides know. Whoever knows the secret can make the same authority and
sign a certificate of its own with it, so nothing is handed over and nothing is written to a disk.

Names in certificates are not compared with addresses: every holder of a certificate of the authority belongs to the cluster."""

import hmac
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from core.config.security_config import SecurityConfig
from core.errors import ConfigError
from core.file_states import file_states

log = logging.getLogger(__name__)

_LABEL = b"baton certificate authority 1"
"""What the authority's key is derived with. Proofs of the same secret begin with other bytes (`channel.py`)."""
_RENEW_S = 24 * 3600.0


class Tls(Protocol):
    """What either side of a new connection begins TLS with."""

    def context(self, *, dialled: bool) -> ssl.SSLContext:
        """Return the context for a connection that begins now. Any thread may call it."""
        ...


def tls_of(security: SecurityConfig, secret: bytes) -> Tls | None:
    """Return what `security.tls` names; None: it is off. Raises ConfigError."""
    match security.tls:
        case "off":
            return None
        case "auto":
            return SecretTls(secret)
        case "files":
            return FileTls(security.tls_cert, security.tls_key, security.tls_ca)


class SecretTls:
    """The authority that belongs to a secret. Certificates are made in memory, and made again when they are a day old."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self._seed, self._clock = hmac.digest(secret, _LABEL, "sha256"), clock
        self._lock, self._made_at = threading.Lock(), -_RENEW_S
        self._contexts: dict[bool, ssl.SSLContext] = {}

    def context(self, *, dialled: bool) -> ssl.SSLContext:
        with self._lock:
            now = self._clock()
            if abs(now - self._made_at) >= _RENEW_S:
                self._contexts, self._made_at = self._make(datetime.fromtimestamp(now, UTC)), now
            return self._contexts[dialled]

    def _make(self, now: datetime) -> dict[bool, ssl.SSLContext]:
        from net.certificates import certificates  # noqa: PLC0415 (8 MB, which a cluster on one host does without)

        member, trusted = certificates(self._seed, now)
        # Python's ssl reads certificates from files alone. This one has no name and is in memory.
        descriptor = os.memfd_create("baton-certificate")
        try:
            os.write(descriptor, member)
            path = f"/proc/self/fd/{descriptor}"
            return {dialled: _context(path, None, trusted, dialled=dialled) for dialled in (False, True)}
        finally:
            os.close(descriptor)


class FileTls:
    """PEM files, read again when they have changed: certificates expire sooner than instances."""

    def __init__(self, cert: str, key: str, ca: str) -> None:
        """Raises ConfigError, naming the file."""
        self._files, self._lock = (cert, key, ca), threading.Lock()
        self._seen = file_states(self._files)
        self._contexts = _read(*self._files)

    def context(self, *, dialled: bool) -> ssl.SSLContext:
        """Files that cannot be used are refused with a line in the log, and the ones before stay in use."""
        with self._lock:
            states = file_states(self._files)
            if states != self._seen:
                self._seen = states
                try:
                    self._contexts = _read(*self._files)
                except ConfigError as error:
                    log.error("the changed certificate is refused, the old one holds: %s", error)
            return self._contexts[dialled]


def _read(cert: str, key: str, ca: str) -> dict[bool, ssl.SSLContext]:
    for what, path in (("tls_cert", cert), ("tls_key", key), ("tls_ca", ca)):
        if not Path(path).is_file():
            raise ConfigError(f"security.{what}: there is no file {path}")
    try:
        trusted = Path(ca).read_text()
        return {dialled: _context(cert, key, trusted, dialled=dialled) for dialled in (False, True)}
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(f"security.tls_cert, tls_key, tls_ca ({cert}, {key}, {ca}): {error}") from error


def _context(cert: str, key: str | None, trusted: str, *, dialled: bool) -> ssl.SSLContext:
    """`trusted`: the authority's certificates, in PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if dialled else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if not dialled:
        context.num_tickets = 0  # nobody resumes a session: each connection shows its certificate
    context.load_cert_chain(cert, key)
    context.load_verify_locations(cadata=trusted)
    return context
