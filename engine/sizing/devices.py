"""Which device an instance computes on, and how much memory that has."""

import os
from pathlib import Path

import torch

from core.cost.memory_model import DeviceMemory
from core.errors import ConfigError
from device.cuda import check_cupy


def choose_device(wanted: str) -> torch.device:
    """Return the device that `name` asks for. `auto` means the first CUDA device, or the CPU without one. Raises ConfigError."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "engine.device is cuda, but torch sees no CUDA device here: install a CUDA build of torch and give the instance a GPU"
        )
    check_cupy()
    return torch.device("cuda", 0)


def memory_of(device: torch.device) -> DeviceMemory:
    """Return the memory of a device of this process, as it is now."""
    if device.type == "cpu":
        return host_memory()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    name = f"{device} ({torch.cuda.get_device_name(device)})"
    return DeviceMemory(name=name, total_bytes=total_bytes, free_bytes=free_bytes, is_host=False)


def give_back_unused() -> None:
    """Give the devices back what torch keeps for later. Raises torch's error where a device can do nothing any more."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def card_of(device: torch.device) -> tuple[str, int]:
    """Return the identity of a GPU, by whatever number this process knows it, and the multiprocessors that the process may
    use of it."""
    found = torch.cuda.get_device_properties(device)
    return str(found.uuid), found.multi_processor_count


def bound_allocations(device: torch.device, num_bytes: int) -> None:
    """Have torch run out of memory on a GPU beyond so many bytes, though more may be free: the rest is another process's."""
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0, num_bytes) / whole), device)


def unused_gpu(index: int) -> DeviceMemory:
    """Return a GPU's memory as if nobody used it. Asking what is free would itself take some hundred MB of that memory."""
    found = torch.cuda.get_device_properties(index)
    return DeviceMemory(
        name=f"cuda:{index} ({found.name})",
        total_bytes=found.total_memory,
        free_bytes=found.total_memory,
        is_host=False,
    )


def host_memory(root: Path = Path("/")) -> DeviceMemory:
    """Return the memory that the kernel could give and that this process's control groups allow. `root` is for tests."""
    kib = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    total, free = (int(kib[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    for group in _control_groups(root):
        if (limit := _number(group / "memory.max")) is not None:
            used = _number(group / "memory.current") or 0
            total, free = min(total, limit), min(free, limit - used + _file_cache(group))
    return DeviceMemory(name="this host", total_bytes=total, free_bytes=max(0, free), is_host=True)


def host_cpus() -> int:
    """Return the number of logical processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def host_cores(root: Path = Path("/")) -> int:
    """Return the number of physical cores that this process may keep busy. Its control groups may allow it less time than the
    cores that it may run on have. Two threads of one core multiply no faster than one, so they count once. `root` is for
    tests."""
    cores = {
        _core(root / f"sys/devices/system/cpu/cpu{number}/topology", number)
        for number in os.sched_getaffinity(0)
    }
    quotas = [_cpu_quota(group / "cpu.max") for group in _control_groups(root)]
    return max(1, int(min([len(cores), *(quota for quota in quotas if quota)])))


def _core(topology: Path, number: int) -> tuple[int, int]:
    """Return (package, core). A processor that says nothing of itself is a core of its own."""
    core = _number(topology / "core_id")
    return (-1, number) if core is None else (_number(topology / "physical_package_id") or 0, core)


def _cpu_quota(path: Path) -> float:
    """Return how many processors' worth of time the control group allows; 0 where it sets no limit."""
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return 0.0


def host_gpus(root: Path = Path("/")) -> int:
    """Count the host's NVIDIA GPUs, visible to this process or not. Returns 0 also where the driver does not say. `root` is for
    tests."""
    return len(list((root / "proc/driver/nvidia/gpus").glob("*")))


def _control_groups(root: Path) -> list[Path]:
    """Yield this process's control group (version 2) and those above it."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = top / own.lstrip("/")
    return [at for at in (folder, *folder.parents) if at.is_relative_to(top) and at.is_dir()]


def _file_cache(group: Path) -> int:
    """Return the bytes of cached files that count as used and that the kernel would give up, as it counts those of a host."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
