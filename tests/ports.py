"""Ports for servers that tests start in processes of their own."""

import contextlib
import random
import socket

_PORTS = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections: one of these would take a free port before its server binds it."""
_claims: list[socket.socket] = []


def free_port() -> int:
    """A port of loopback that nobody listens at, and that no other test process gets while this one lives."""
    for port in random.sample(_PORTS, len(_PORTS)):
        if _is_free(port) and _claim(port):
            return port
    raise AssertionError(f"no port of {_PORTS} is free")


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _claim(port: int) -> bool:
    """A name in Linux's abstract namespace of sockets is gone with the process that has bound it."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0baton-test-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True
