"""The secret by which the processes of one Ray cluster know each other: the operator's, or one that is made once and kept by Ray.

It is kept in Ray's control store, where Serve keeps it anyway (it is an argument of every replica), so that a new version of the
application can talk to the old one's processes. Anybody who can read that store can run any code on the cluster."""

import secrets

from ray.experimental import internal_kv

from core.config.cluster_config import ClusterConfig

_NAME, _NAMESPACE = b"cluster_key", b"baton"


def cluster_key(config: ClusterConfig) -> bytes:
    """Return the key. The process must be connected to Ray."""
    if config.cluster_key is not None:
        return config.cluster_key.get_secret_value().encode()
    internal_kv._internal_kv_put(  # pyright: ignore[reportPrivateUsage]
        _NAME, secrets.token_hex(32).encode(), overwrite=False, namespace=_NAMESPACE
    )
    return internal_kv._internal_kv_get(_NAME, namespace=_NAMESPACE)  # pyright: ignore[reportPrivateUsage]
