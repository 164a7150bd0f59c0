"""TLS at the ingress, and with an authority for clients mutual TLS."""

import ssl
from pathlib import Path

from core.errors import ConfigError
from core.serve_config import ServeConfig


def ingress_tls(config: ServeConfig) -> ssl.SSLContext | None:
    """Return the TLS context, or None without a certificate. Raises ConfigError, naming the key."""
    files = {"tls_cert": config.tls_cert, "tls_key": config.tls_key, "tls_client_ca": config.tls_client_ca}
    if not any(files.values()):
        return None
    if not config.tls_cert or not config.tls_key:
        raise ConfigError(
            "serve.tls_cert and serve.tls_key belong together, and serve.tls_client_ca needs both"
        )
    for name, path in files.items():
        if path and not Path(path).is_file():
            raise ConfigError(f"serve.{name}: there is no file {path}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
        if config.tls_client_ca:
            context.load_verify_locations(config.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"serve.tls_cert, tls_key, tls_client_ca: {error}") from error
    return context
