"""Whether a Ray answers where the operator says that one runs: Ray itself would try for more than a minute."""

import contextlib
import socket

from ray._private import services

from core.errors import ConfigError

_TIMEOUT_S = 5.0


def check_ray_address(address: str) -> None:
    """Raise ConfigError unless something listens at a Ray's address: HOST:PORT, ray://HOST:PORT, or `auto` for this host's."""
    if address == "auto":
        if not services.find_gcs_addresses():
            raise ConfigError("--ray-address auto: no Ray runs on this host; `local` starts one")
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--ray-address {address}: give HOST:PORT of a Ray head (its port is 6379 unless chosen), auto, or local"
        )
    try:
        with contextlib.closing(socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S)):
            pass
    except OSError as error:
        raise ConfigError(
            f"--ray-address {address}: no Ray answers there ({error.strerror or error}); `ray status` on its head says whether "
            "it runs"
        ) from None
