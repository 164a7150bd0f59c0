"""Certificates of an authority that belongs to a secret."""

from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_SLACK = timedelta(days=1)
"""How much earlier than its making a certificate is valid: hosts' clocks differ."""
_VALID = timedelta(days=7)


def certificates(seed: bytes, now: datetime) -> tuple[bytes, str]:
    """Return a new certificate with its key, and that of the authority whose key is `seed` (32 bytes), in PEM."""
    authority, key, name = (
        Ed25519PrivateKey.from_private_bytes(seed),
        Ed25519PrivateKey.generate(),
        _named("Baton cluster"),
    )
    member = _signed(_named("Baton process"), key, name, authority, now)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    trusted = _signed(name, authority, name, authority, now)
    return member.public_bytes(Encoding.PEM) + private, trusted.public_bytes(Encoding.PEM).decode()


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
