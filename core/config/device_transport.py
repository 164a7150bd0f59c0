"""Which transports go with which device."""

from core.errors import ConfigError


def check_device_transport(transport: str, wanted: str, device: str) -> None:
    """Raise ConfigError for a transport that cannot move KV on `device`, which is what `engine.device` = `wanted` comes to."""
    if transport in ("cuda_ipc", "nccl") and device == "cpu":
        auto = "" if wanted == "cpu" else f"engine.device {wanted} comes to CPUs here, and "
        raise ConfigError(
            f"{auto}transfer.transport {transport} moves GPU memory; CPUs hand KV over in host memory: use auto, shm, tcp or nixl"
        )
    if transport == "shm" and device == "cuda":
        raise ConfigError(
            "transfer.transport shm moves host memory, and the KV of GPUs is in their own: use auto, tcp, cuda_ipc, nixl or nccl"
        )
