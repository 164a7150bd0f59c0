"""The store that a configuration names."""

from cluster.store.sql_store import SqlStore
from core.config.serve_config import ServeConfig
from core.config.store_url import store_reader


def open_store(serve: ServeConfig) -> SqlStore:
    """Return the store; one in memory where none is named. Nothing is read or connected to before its first use."""
    return SqlStore(store_reader(serve), serve.store_timeout_s)
