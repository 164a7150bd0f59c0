"""Rules for configuration keys that need each other, by section."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from core.config.adapter_config import check_adapters
from core.config.device_transport import check_device_transport
from core.config.jwt_config import check_jwt
from core.config.parallel_config import ParallelConfig, check_shares
from core.config.security_config import check_security
from core.config.store_url import check_store, store_reader
from core.errors import ConfigError

if TYPE_CHECKING:
    from core.config.cluster_config import ClusterConfig


def _check_pools(config: "ClusterConfig") -> None:
    if config.any_role and config.prefill_instances:
        raise ConfigError(
            f"any_role leaves no instance for prefill alone: set prefill_instances to 0 (it is {config.prefill_instances})"
        )


def _check_transfer(config: "ClusterConfig") -> None:
    check_device_transport(config.transfer.transport, config.engine.device, config.engine.device)
    if config.transfer.kv_replicas and not config.engine.host_cache_bytes:
        raise ConfigError(
            "transfer.kv_replicas keeps copies in host memory: set engine.host_cache_bytes, too"
        )


def _check_serve(config: "ClusterConfig") -> None:
    serve = config.serve
    for name, folder in (("batch_dir", serve.batch_dir), ("usage_dir", serve.usage_dir)):
        if folder and not Path(folder).expanduser().is_absolute():
            raise ConfigError(
                f"serve.{name} is {folder!r}: give a whole path, since ingresses have working folders of their own"
            )
    check_store(serve)
    if serve.num_ports > 1 and not 0 < serve.port <= 65536 - serve.num_ports:
        raise ConfigError("serve.num_ports counts ports from serve.port on: they must be 1 to 65535")


def _check_adapters(config: "ClusterConfig") -> None:
    check_adapters(config.adapters)
    if config.adapters.list_file and store_reader(config.serve) is None:
        raise ConfigError(
            "adapters.list_file is read once, to copy it into the store that keeps which adapters are loaded: name that in "
            "serve.store"
        )


def _check_tiers(config: "ClusterConfig") -> None:
    engine = config.engine
    if engine.disk_cache_bytes and not engine.disk_cache_path:
        raise ConfigError("engine.disk_cache_bytes is set: say where with engine.disk_cache_path")
    if (engine.host_cache_bytes or engine.disk_cache_bytes) and not engine.prefix_cache:
        raise ConfigError("host_cache_bytes and disk_cache_bytes keep prefixes: set engine.prefix_cache")


def _check_meshes(config: "ClusterConfig") -> None:
    for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
        if pool.hosts > 1:
            _check_hosts(config, role, pool)
        if config.engine.deterministic and (pool.ep_redundant_experts or pool.ep_balance_interval_s):
            raise ConfigError(
                f"engine.deterministic adds an expert's part up where it lies: it needs {role}.ep_redundant_experts and "
                f"ep_balance_interval_s of 0"
            )


def _check_classes(config: "ClusterConfig") -> None:
    for name, slo in config.slo_classes.items():
        for figure in ("ttft_s", "tpot_s", "weight"):
            if getattr(slo, figure) <= 0:
                raise ConfigError(f"slo_classes.{name}.{figure} must be greater than 0")


def _check_tenants(config: "ClusterConfig") -> None:
    for name, tenant in config.tenants.items():
        if unknown := [one for one in tenant.slo_classes if one not in config.slo_classes]:
            raise ConfigError(f"tenants.{name}.slo_classes: {unknown[0]!r} is not among slo_classes")
        if not (tenant.keys or tenant.keys_file or config.jwt.is_on):
            raise ConfigError(f"tenants.{name} has neither keys nor a keys_file: nobody could be it")


def _check_shadow(config: "ClusterConfig") -> None:
    schedule = config.schedule
    if schedule.shadow_tuning and not schedule.record_path:
        raise ConfigError(
            "schedule.shadow_tuning writes what it would decide to schedule.record_path: name a file there"
        )


def _check_card(config: "ClusterConfig") -> None:
    """Check what instances that share a card need."""
    check_shares(config.prefill, config.decode)
    if not config.decode.shares_card:
        return
    here = f"decode.gpu_share is {config.decode.gpu_share:g}"
    if not config.prefill_instances:
        raise ConfigError(f"{here}: its card is for a prefill instance, too, and prefill_instances is 0")
    if config.engine.device != "cuda":
        raise ConfigError(f"{here}: set engine.device to cuda (it is {config.engine.device})")
    if config.transfer.transport == "nccl":
        raise ConfigError(f"{here}, and NCCL joins no two processes on one card: use auto, cuda_ipc or tcp")


def _check_hosts(config: "ClusterConfig", role: str, pool: ParallelConfig) -> None:
    here, groups, engine = f"{role}.hosts is {pool.hosts}", pool.num_ranks // pool.tp, config.engine
    if pool.hosts > groups:
        raise ConfigError(f"{here}: its tensor parallel groups stay together, and an instance has {groups}")
    if config.transfer.transport in ("shm", "cuda_ipc", "loopback"):
        raise ConfigError(f"{here}, and transfer.transport {config.transfer.transport} leaves no host")
    if engine.host_cache_bytes or engine.disk_cache_bytes:
        raise ConfigError(f"{here}: host_cache_bytes and disk_cache_bytes need ranks on one host")


def _check_scaling(config: "ClusterConfig") -> None:
    scaling = config.scaling
    if not scaling.enabled:
        return
    if scaling.shrink_below >= scaling.target:
        raise ConfigError(
            f"scaling.shrink_below must be less than scaling.target ({scaling.target:g}), not {scaling.shrink_below:g}"
        )
    pools = [("decode", config.decode_instances, scaling.decode_min, scaling.decode_max)]
    if config.prefill_instances:
        pools.append(("prefill", config.prefill_instances, scaling.prefill_min, scaling.prefill_max))
    for name, size, at_least, at_most in pools:
        if not at_least <= size <= at_most:
            raise ConfigError(
                f"{name}_instances is {size}, outside scaling.{name}_min to scaling.{name}_max ({at_least} to {at_most})"
            )


RULES: tuple[Callable[["ClusterConfig"], None], ...] = (
    _check_scaling,
    _check_transfer,
    check_security,
    _check_card,
    _check_pools,
    _check_serve,
    _check_adapters,
    _check_tiers,
    _check_meshes,
    _check_classes,
    _check_tenants,
    _check_shadow,
    check_jwt,
)
"""Each raises ConfigError. The first error is reported."""
