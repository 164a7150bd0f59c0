"""TLS at the ingress, and with an authority for clients mutual TLS."""

import asyncio
import logging
import ssl
from pathlib import Path

from core.config.serve_config import ServeConfig
from core.errors import ConfigError
from core.file_states import FileStates, file_states

log = logging.getLogger(__name__)

_PERIOD_S = 10.0


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
    _read_into(context, config)
    return context


async def follow_certificate(
    context: ssl.SSLContext | None, config: ServeConfig, period_s: float = _PERIOD_S
) -> None:
    """Show new connections what the certificate's files have now, whenever they change: certificates expire sooner than servers.
    Runs until it is cancelled. Returns at once without TLS."""
    files = [path for path in (config.tls_cert, config.tls_key, config.tls_client_ca) if path]
    seen: FileStates | None = None  # `context` may have read them long before this begins to follow
    while context is not None:
        await asyncio.sleep(period_s)
        states = await asyncio.to_thread(file_states, files)
        if states == seen:
            continue
        seen = states
        try:
            # First by a context of its own: half of a pair would leave this one without a key.
            await asyncio.to_thread(ingress_tls, config)
            _read_into(context, config)
        except ConfigError as error:
            log.error("the changed certificate is refused, the old one holds: %s", error)
        else:
            log.info("new connections see the certificate %s as it is now", config.tls_cert)


def _read_into(context: ssl.SSLContext, config: ServeConfig) -> None:
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
        if config.tls_client_ca:
            context.load_verify_locations(config.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"serve.tls_cert, tls_key, tls_client_ca: {error}") from error
