"""The secret by which the processes of one Ray cluster know each other: the operator's, or one that is made once and kept by Ray.

Kept in Ray's control store, where Serve keeps it anyway (it is an argument of every replica), so that a new version of the
application talks to what still runs of the old one. Who can read that store can run any code on the cluster."""

import secrets

from ray.experimental import internal_kv

from core.config import ClusterConfig

_NAME, _NAMESPACE = b"cluster_key", b"baton"


def cluster_key(config: ClusterConfig) -> bytes:
    """Must run in a process that is connected to Ray."""
    if config.cluster_key is not None:
        return config.cluster_key.get_secret_value().encode()
    internal_kv._internal_kv_put(  # pyright: ignore[reportPrivateUsage]
        _NAME, secrets.token_hex(32).encode(), overwrite=False, namespace=_NAMESPACE
    )
    return internal_kv._internal_kv_get(_NAME, namespace=_NAMESPACE)  # pyright: ignore[reportPrivateUsage]
