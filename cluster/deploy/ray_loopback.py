"""Keeps Ray and Serve to loopback where the whole cluster is on this host. Neither has an option for that."""

import os
from typing import Any

from ray._private import ray_constants, services
from ray.serve._private import replica

_LOOPBACK = {"127.0.0.1", "localhost", "::1", "[::1]"}


def keep_ray_to_loopback() -> None:
    """Keep a Ray that this process starts to loopback. Call it before `ray.init`.

    Ray's processes listen at their node's address, and Ray takes the host's address in the network for it, even where 127.0.0.1
    is given. It stays on loopback only where it believes that no other node can join, as on a Mac. It reads the variable when it
    is imported, which has happened here already, and is still to happen in its processes."""
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def is_on_loopback(ray_address: str) -> bool:
    """Return whether a running Ray (`auto` means the one of this host) listens on loopback alone, as one that `baton serve` has
    started. A process that joins it must call `keep_ray_to_loopback` first, or it looks for Ray at the host's address in the
    network. One that joins any other Ray must not, though it may be given that one's port at 127.0.0.1: Ray's own processes on
    this host say where they listen."""
    here = services.find_gcs_addresses()
    if ray_address != "auto":
        host, _, port = ray_address.rpartition(":")
        if host not in _LOOPBACK:
            return False
        here = {address for address in here if address.rpartition(":")[2] == port} or {ray_address}
    hosts = {address.rpartition(":")[0] for address in here}
    return bool(hosts) and hosts <= _LOOPBACK


def keep_replica_to_loopback() -> None:
    """Keep a deployment's replica to loopback. Call it in its constructor, since Serve then opens a port for calls of its
    methods."""
    listen = replica.add_port_to_grpc_server  # pyright: ignore[reportPrivateImportUsage]

    def listen_on_loopback(server: Any, address: str) -> int:
        return listen(server, address.replace("[::]", "127.0.0.1"))

    replica.add_port_to_grpc_server = listen_on_loopback  # pyright: ignore[reportPrivateImportUsage]
