"""What crosses hosts unencrypted: named once at the start, or refused (`security.strict`)."""

import logging
from collections.abc import Iterator, Mapping
from ipaddress import ip_address

from core.config.cluster_config import ClusterConfig
from core.errors import ConfigError

log = logging.getLogger(__name__)


def check_clear_ways(config: ClusterConfig, env: Mapping[str, str]) -> None:
    """Check a cluster on several hosts. `env`: of a process that has joined its Ray. Raises ConfigError if `security.strict`."""
    found = list(_clear_ways(config, env))
    if found and config.security.strict:
        raise ConfigError(f"security.strict refuses what would cross hosts unencrypted: {'; '.join(found)}")
    if found:
        log.warning("crosses hosts unencrypted: %s", "; ".join(found))


def _clear_ways(config: ClusterConfig, env: Mapping[str, str]) -> Iterator[str]:
    if config.security.tls == "off":
        yield "mail, KV and plans (set security.tls to auto or files)"
    if (transport := config.transfer.transport) in ("nixl", "nccl"):
        yield f"KV by {transport} (set transfer.transport to auto or tcp)"
    for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
        if pool.hosts > 1:
            yield f"tensors among the ranks of an instance, by gloo or NCCL (set {role}.hosts to 1)"
    if env.get("RAY_USE_TLS") != "1":
        yield "Ray's own connections, which carry the cluster key (set RAY_USE_TLS to 1)"
    if not config.serve.tls_cert and not _is_loopback(config.serve.host):
        yield "HTTP (set serve.tls_cert and tls_key, or serve.host to 127.0.0.1 where a proxy of the same host encrypts)"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
