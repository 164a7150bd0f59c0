"""Joins the Ray that the operator names, if one answers there: Ray itself would try for more than a minute."""

import contextlib
import logging
import socket
from typing import Any

import ray
from ray._private import services

from cluster.deploy.ray_loopback import is_on_loopback, keep_ray_to_loopback
from core.errors import ConfigError

_TIMEOUT_S = 5.0
_NOT_LET_IN = (
    "that Ray asks for its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH where "
    "the token is not in ~/.ray/auth_token"
)


def join_ray(address: str, **options: Any) -> None:
    """Connect this process to a running Ray. `options` are those of `ray.init`. Raises ConfigError."""
    check_ray_address(address)
    if is_on_loopback(address):
        keep_ray_to_loopback()
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **options)
    except (ConnectionError, RuntimeError) as error:
        cause = str(error.__cause__ or error).strip()
        why = _NOT_LET_IN if "Unauthenticated" in cause else cause.splitlines()[-1]
        raise ConfigError(f"--ray-address {address}: {why}") from None


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
