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
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from core.config.security_config import SecurityConfig
from core.errors import ConfigError
from core.file_states import file_states

log = logging.getLogger(__name__)

_LABEL = b"baton certificate authority 1"
"""What the authority's key is derived with. Proofs of the same secret begin with other bytes (`channel.py`)."""
_RENEW_S = 24 * 3600.0
_SLACK = timedelta(days=1)
"""How much earlier than its making a certificate is valid: hosts' clocks differ."""
_VALID = timedelta(days=7)


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
        seed = hmac.digest(secret, _LABEL, "sha256")
        self._authority, self._clock = Ed25519PrivateKey.from_private_bytes(seed), clock
        self._lock, self._made_at = threading.Lock(), -_RENEW_S
        self._contexts: dict[bool, ssl.SSLContext] = {}

    def context(self, *, dialled: bool) -> ssl.SSLContext:
        with self._lock:
            if abs(self._clock() - self._made_at) >= _RENEW_S:
                self._made_at = self._clock()
                self._contexts = self._make(datetime.fromtimestamp(self._made_at, UTC))
            return self._contexts[dialled]

    def _make(self, now: datetime) -> dict[bool, ssl.SSLContext]:
        key, name = Ed25519PrivateKey.generate(), _named("Baton cluster")
        authority = _signed(name, self._authority, name, self._authority, now)
        member = _signed(_named("Baton process"), key, name, self._authority, now)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        # Python's ssl reads certificates from files alone. This one has no name and is in memory.
        descriptor = os.memfd_create("baton-certificate")
        try:
            os.write(descriptor, member.public_bytes(Encoding.PEM) + private)
            path, trusted = f"/proc/self/fd/{descriptor}", authority.public_bytes(Encoding.PEM).decode()
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


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _signed(
    subject: x509.Name, key: Ed25519PrivateKey, issuer: x509.Name, authority: Ed25519PrivateKey, now: datetime
) -> x509.Certificate:
    """Return a certificate of `key`: the authority's own if that is its key, otherwise a process's."""
    is_authority, public = key is authority, key.public_key()
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    sides = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    own, above = (
        x509.SubjectKeyIdentifier.from_public_key(public),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
    )
    builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
    builder = builder.not_valid_before(now - _SLACK).not_valid_after(now + _VALID)
    builder = builder.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
    builder = builder.add_extension(usage, critical=True).add_extension(sides, critical=False)
    builder = builder.add_extension(own, critical=False).add_extension(above, critical=False)
    return builder.sign(authority, None)
