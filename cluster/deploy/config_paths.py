"""Checks every path that a configuration names: there, readable or writable, and with what it should have.

A process checks its own before anything else. Where all processes will be on this host, all are checked before any is started.
`model.path` and `model.adapters` are read for the model's card, which is made before anything starts, too."""

from importlib.util import find_spec
from pathlib import Path

from cluster.ingress.http.ingress_tls import ingress_tls
from cluster.ingress.tenants.live_rules import LiveRules
from core.config.cluster_config import ClusterConfig
from core.config.draft_config import draft_path
from core.config.path_checks import readable_file, readable_folder, writable_file, writable_folder
from core.config.security_config import SecurityConfig
from core.config.serve_config import ServeConfig
from core.config.store_url import sqlite_path, store_reader
from core.cost.step_profile import read_profile
from core.errors import ConfigError
from models.files.hub import folder_of
from net.tls import FileTls


def check_paths(config: ClusterConfig) -> None:
    """Check the paths of all processes. Raises ConfigError, naming the key."""
    check_ingress_paths(config)
    for row in config.rows:
        check_scheduler_paths(row)
        check_instance_paths(row)


def check_ingress_paths(config: ClusterConfig) -> None:
    """Check certificates, the files of keys and of live rules, and the folder of batches. Raises ConfigError."""
    serve = config.serve
    _check_tls_files(config.security)
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        if path := getattr(serve, name):
            readable_file(f"serve.{name}", path)
    ingress_tls(serve)
    LiveRules(config)
    for name in ("batch_dir", "usage_dir"):
        if folder := getattr(serve, name):
            writable_folder(f"serve.{name}", folder)
    _check_store(serve)
    for row in config.rows:
        _check_adapter_folders(row)


def check_scheduler_paths(config: ClusterConfig) -> None:
    """Check certificates, and the files that a scheduler writes. Raises ConfigError."""
    _check_tls_files(config.security)
    if path := config.schedule.record_path:
        writable_file("schedule.record_path", path)
    if config.adapters.folders:
        _check_store(config.serve)


def check_instance_paths(config: ClusterConfig) -> None:
    """Check what an instance reads and writes beside the model. Raises ConfigError."""
    engine = config.engine
    if engine.disk_cache_bytes:
        writable_folder("engine.disk_cache_path", engine.disk_cache_path)
    if engine.profile:
        readable_file("engine.profile", engine.profile)
        read_profile(Path(engine.profile))
    if path := draft_path(engine):
        try:
            folder_of(path)
        except ConfigError as error:
            raise ConfigError(f"engine.speculate: {error}") from None
    _check_tls_files(config.security)
    _check_adapter_folders(config)


def _check_store(serve: ServeConfig) -> None:
    """Check that the store can be opened, as far as that needs no connection."""
    if (read := store_reader(serve)) is None:
        return
    if (path := sqlite_path(read())) is not None:
        writable_folder("serve.store", str(path.parent))
        if path.exists():
            writable_file("serve.store", str(path))
    elif find_spec("psycopg") is None:
        raise ConfigError(
            "serve.store names PostgreSQL, which needs psycopg: pip install 'baton-serve[postgres]'"
        )


def _check_adapter_folders(config: ClusterConfig) -> None:
    for folder in config.adapters.folders:
        readable_folder("adapters.folders", folder)


def _check_tls_files(security: SecurityConfig) -> None:
    if security.tls == "files":
        for name in ("tls_cert", "tls_key", "tls_ca"):
            readable_file(f"security.{name}", getattr(security, name))
        FileTls(security.tls_cert, security.tls_key, security.tls_ca)
