"""A certificate authority for tests, as an operator would have one."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._cert = self._sign(name, self._key.public_key(), days=1, authority=True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def member(self, name: str, days: float = 1) -> tuple[str, str, str]:
        """Return the files of a certificate, its key and the authority. It expires in `days`."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self._sign(name, key.public_key(), days=days, authority=False)
        cert_path, key_path = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert_path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        pkcs8 = serialization.PrivateFormat.PKCS8
        key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
        return str(cert_path), str(key_path), str(self.path)

    def _sign(
        self, name: str, public: ec.EllipticCurvePublicKey, *, days: float, authority: bool
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)])
        builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=9)).not_valid_after(
            now + timedelta(days=days)
        )
        constraints = x509.BasicConstraints(ca=authority, path_length=None)
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        builder = builder.add_extension(names, critical=False).add_extension(constraints, critical=True)
        return builder.sign(self._key, hashes.SHA256())
