"""Checks every path that a configuration names: there, readable or writable, and with what it should have.

A process checks its own before anything else. Where all processes will be on this host, all are checked before any is started.
`model.path` and `model.adapters` are read for the model's card, which is made before anything starts, too."""

import ssl
from pathlib import Path

from cluster.ingress.http.ingress_tls import ingress_tls
from cluster.ingress.tenants.live_rules import LiveRules
from core.config.cluster_config import ClusterConfig, TransferConfig
from core.config.draft_config import draft_path
from core.config.path_checks import readable_file, readable_folder, writable_file, writable_folder
from core.cost.step_profile import read_profile
from core.errors import ConfigError
from models.files.hub import folder_of


def check_paths(config: ClusterConfig) -> None:
    """Check the paths of all processes. Raises ConfigError, naming the key."""
    check_ingress_paths(config)
    check_scheduler_paths(config)
    check_instance_paths(config)


def check_ingress_paths(config: ClusterConfig) -> None:
    """Check certificates, the files of keys and of live rules, and the folder of batches. Raises ConfigError."""
    serve = config.serve
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        if path := getattr(serve, name):
            readable_file(f"serve.{name}", path)
    ingress_tls(serve)
    LiveRules(config)
    if serve.batch_dir:
        writable_folder("serve.batch_dir", serve.batch_dir)
    _check_adapter_folders(config)


def check_scheduler_paths(config: ClusterConfig) -> None:
    """Check the files that a scheduler writes. Raises ConfigError."""
    if path := config.schedule.record_path:
        writable_file("schedule.record_path", path)
    if path := config.adapters.list_file:
        writable_file("adapters.list_file", path)


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
    _check_kv_tls(config.transfer)
    _check_adapter_folders(config)


def _check_adapter_folders(config: ClusterConfig) -> None:
    for folder in config.adapters.folders:
        readable_folder("adapters.folders", folder)


def _check_kv_tls(config: TransferConfig) -> None:
    files = {"tls_cert": config.tls_cert, "tls_key": config.tls_key, "tls_ca": config.tls_ca}
    if not any(files.values()):
        return
    for name, path in files.items():
        if not path:
            raise ConfigError("transfer.tls_cert, tls_key and tls_ca belong together: set all three or none")
        readable_file(f"transfer.{name}", path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
        context.load_verify_locations(config.tls_ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"transfer.tls_cert, tls_key, tls_ca: {error}") from None
