"""Builds an instance's lower tiers from the configuration."""

import fcntl
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from core.config.cluster_config import EngineConfig
from core.errors import ConfigError
from core.kv import RankPool
from device.port import PoolMemory
from engine.tiers.block_digests import root_digest
from engine.tiers.block_pieces import BlockPieces
from engine.tiers.disk_tier import DiskTier
from engine.tiers.host_tier import HostTier
from engine.tiers.pool_bytes import PoolBytes
from engine.tiers.tier_store import TierStore

_MAX_INSTANCES = 256


def build_tiers(
    config: EngineConfig,
    memory: memoryview | PoolMemory,
    pools: Sequence[RankPool],
    revision: str,
    remote: Mapping[int, PoolBytes] | None = None,
    *,
    kept: HostTier | None = None,
) -> TierStore | None:
    """Return the tiers, or None when both are off. `pools` are those of the instance's ranks, in `memory` and in the `remote`
    ones, by their numbers; `revision` is that of the weights. `kept` is the host tier of tiers for the same pools and weights
    that were closed. Raises ConfigError."""
    if not config.host_cache_bytes and not config.disk_cache_bytes:
        return None
    pieces = BlockPieces(memory, pools, remote)
    root = root_digest(revision.encode() + b"|" + pieces.fingerprint, "")
    host = kept or HostTier(config.host_cache_bytes // pieces.num_bytes)
    return TierStore(pieces, host, _disk(config, pieces.num_bytes, root), root)


def _disk(config: EngineConfig, block_bytes: int, root: bytes) -> DiskTier | None:
    if not config.disk_cache_bytes:
        return None
    path, lock = _own_file(Path(config.disk_cache_path).expanduser())
    return DiskTier(path, config.disk_cache_bytes, block_bytes, root, lock)


def _own_file(folder: Path) -> tuple[Path, int]:
    """Return the first file in `folder` that no living instance has; after a restart it is one with content. The lock holds
    it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.islice(itertools.count(), _MAX_INSTANCES):
            lock = os.open(folder / f"kv-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return folder / f"kv-{number}", lock
            except BlockingIOError:
                os.close(lock)
    except OSError as error:
        raise ConfigError(
            f"engine.disk_cache_path {folder} cannot be used: {error.strerror or error}"
        ) from error
    raise ConfigError(f"engine.disk_cache_path {folder}: {_MAX_INSTANCES} instances use it already")
