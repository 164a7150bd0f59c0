"""Checks of one node by itself: memory limits, shared memory, devices, libraries."""

import importlib.util
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from cluster.preflight.findings import Finding, Verdict
from cluster.scheduler.compiled import scheduler_is_compiled
from core.errors import ConfigError
from models.files.hub import folder_of

_MIN_FILES = 4096
_MIN_MEMLOCK_BYTES = 1 << 30


def check_host(where: str, kv_bytes: int, model: str, root: Path = Path("/")) -> list[Finding]:
    """Run all of them. `kv_bytes` are the KV pools that instances of this node will keep in shared memory, and `model` is the
    configuration's model.path. `root` is for tests."""
    rdma = list(_rdma(where, root))
    return [
        check_model(where, model),
        _shared_memory(where, kv_bytes, root / "dev/shm"),
        _memlock(where, needed=bool(rdma)),
        _open_files(where),
        *rdma,
        _nixl(where, has_rdma=bool(rdma)),
        *_gpus(where),
        _scheduler(where),
    ]


def check_model(where: str, path: str) -> Finding:
    """Check that a model's folder is on this node."""
    try:
        folder = folder_of(path)
    except ConfigError as error:
        fix = "put the model's folder at this path on every node (a copy, or a shared file system)"
        return Finding(
            where=where,
            check="model",
            verdict=Verdict.FAIL,
            measured=str(error),
            expected=f"a folder {path}",
            fix=fix,
        )
    if folder is None:
        return Finding(
            where=where,
            check="model",
            verdict=Verdict.SKIP,
            measured=f"{path}, from the hub as an instance starts",
        )
    return Finding(where=where, check="model", verdict=Verdict.OK, measured=str(folder))


def _shared_memory(where: str, kv_bytes: int, folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    enough = free >= kv_bytes
    return Finding(
        where=where,
        check="shared memory",
        verdict=Verdict.OK if enough else Verdict.FAIL,
        measured=f"{free / 2**30:.2f} GiB free",
        expected=f"{kv_bytes / 2**30:.2f} GiB for the KV pools" if kv_bytes else "pools take what is free",
        fix=""
        if enough
        else "make /dev/shm larger (docker run --shm-size, an emptyDir with medium: Memory) or lower engine.kv_bytes",
    )


def _scheduler(where: str) -> Finding:
    measured = "compiled" if scheduler_is_compiled() else "interpreted"
    return Finding(
        where=where,
        check="scheduler",
        verdict=Verdict.OK,
        measured=measured,
        expected="compiled, for thousands of instances",
    )


def _memlock(where: str, *, needed: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    low = soft != resource.RLIM_INFINITY and soft < _MIN_MEMLOCK_BYTES
    measured = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    if not low:
        return Finding(where=where, check="memlock", verdict=Verdict.OK, measured=measured)
    verdict = Verdict.FAIL if needed else Verdict.OK
    fix = "RDMA pins its memory: ulimit -l unlimited, or IPC_LOCK for the container" if needed else ""
    return Finding(
        where=where,
        check="memlock",
        verdict=verdict,
        measured=measured,
        expected="unlimited, for RDMA",
        fix=fix,
    )


def _open_files(where: str) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft < _MIN_FILES
    fix = f"ulimit -n {_MIN_FILES}: a large cluster has a connection between any two processes" if low else ""
    verdict = Verdict.WARN if low else Verdict.OK
    return Finding(
        where=where,
        check="open files",
        verdict=verdict,
        measured=str(soft),
        expected=f"at least {_MIN_FILES}",
        fix=fix,
    )


def _rdma(where: str, root: Path) -> Iterator[Finding]:
    """Return one finding for each port of each RDMA device."""
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state = _read(port / "state") or "unknown"
        rate = _read(port / "rate") or "unknown rate"
        name = f"RDMA {port.parts[-3]} port {port.name}"
        up = "ACTIVE" in state
        fix = "" if up else "bring the port up (cable, switch, driver), or leave the device out of NIXL's"
        yield Finding(
            where=where,
            check=name,
            verdict=Verdict.OK if up else Verdict.FAIL,
            measured=f"{state}, {rate}",
            expected="4: ACTIVE",
            fix=fix,
        )


def _nixl(where: str, *, has_rdma: bool) -> Finding:
    if importlib.util.find_spec("nixl_cu12") or importlib.util.find_spec("nixl_cu13"):
        return Finding(where=where, check="NIXL", verdict=Verdict.OK, measured="installed")
    if not has_rdma:
        return Finding(
            where=where,
            check="NIXL",
            verdict=Verdict.SKIP,
            measured="not installed, and no RDMA device that it could use",
        )
    fix = "pip install --no-deps nixl-cu12==1.5.1: KV would go over TCP without it"
    return Finding(
        where=where,
        check="NIXL",
        verdict=Verdict.WARN,
        measured="not installed",
        expected="installed, for RDMA",
        fix=fix,
    )


def _gpus(where: str) -> Iterator[Finding]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Finding(
            where=where, check="GPUs", verdict=Verdict.SKIP, measured="none: this node computes on its CPU"
        )
        return
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    yield Finding(where=where, check="GPUs", verdict=Verdict.OK, measured=f"{count}: {names}")
    apart = [
        f"{i}-{j}"
        for i in range(count)
        for j in range(i + 1, count)
        if not torch.cuda.can_device_access_peer(i, j)
    ]
    fix = (
        "tensor parallelism will copy through host memory: check the IOMMU and ACS settings" if apart else ""
    )
    yield Finding(
        where=where,
        check="GPU peer access",
        verdict=Verdict.WARN if apart else Verdict.OK,
        measured=f"none between {', '.join(apart)}" if apart else "between all",
        expected="between all",
        fix=fix,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
