"""Checks of what each model of a configuration needs of this node."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from cluster.preflight.card_check import check_card
from cluster.preflight.findings import Finding
from cluster.preflight.memory_check import check_memory
from cluster.preflight.node_checks import check_host, check_model
from core.config.cluster_config import ClusterConfig
from core.config.pools import PoolName


def check_node(
    where: str,
    config: ClusterConfig,
    kv_bytes: int,
    pools: Mapping[str, Sequence[PoolName]],
    env: Mapping[str, str],
    num_instances: int = 0,
) -> Iterator[Finding]:
    """Yield what is found of the node and of each model on it. `pools`: by a model's name, those that have instances here.
    `kv_bytes` and `num_instances` are as in `check_host` and `check_memory`."""
    first, *others = config.rows
    host = check_host(where, kv_bytes, first.model.path)
    yield from named(host[:1], config, first)
    yield from (
        finding for row in others for finding in named([check_model(where, row.model.path)], config, row)
    )
    yield from host[1:]
    for row in config.rows:
        here = pools.get(row.model.name, ())
        yield from named(check_memory(where, row, here, num_instances), config, row)
    for row in config.rows:
        if pools.get(row.model.name):
            yield from named(check_card(where, row, env), config, row)


def named(findings: Iterable[Finding], config: ClusterConfig, row: ClusterConfig) -> list[Finding]:
    """Return findings that say whose they are, where there are several models."""
    of_model = f" of {row.model.name}" if config.models else ""
    return [replace(finding, check=finding.check + of_model) for finding in findings]
