"""The store that a configuration names."""

import logging

from cluster.store.sql_store import SqlStore
from core.config.cluster_config import ClusterConfig
from core.config.serve_config import ServeConfig
from core.config.store_url import sqlite_path, store_reader

log = logging.getLogger(__name__)


def open_store(serve: ServeConfig) -> SqlStore:
    """Return the store; one in memory where none is named. Nothing is read or connected to before its first use."""
    return SqlStore(store_reader(serve), serve.store_timeout_s)


def warn_of_apart(config: ClusterConfig, *, one_host: bool) -> None:
    """Log where several ingresses are to run, and do not share what they store."""
    if config.ingress_instances == 1:
        return
    if (read_url := store_reader(config.serve)) is None:
        log.warning(
            "%d ingresses share no store: each one knows only the responses and conversations that it has stored itself. Name a "
            "database in serve.store",
            config.ingress_instances,
        )
    elif not one_host and sqlite_path(read_url()) is not None:
        log.warning(
            "serve.store is SQLite, which the ingresses and schedulers of one host share: on several hosts each has another "
            "store. Name PostgreSQL"
        )
