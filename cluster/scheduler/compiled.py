"""Says whether the scheduler that would run here is machine code (docs/adr/109). Its sources are the same."""

from cluster.scheduler import global_scheduler


def scheduler_is_compiled() -> bool:
    return not global_scheduler.__file__.endswith(".py")
