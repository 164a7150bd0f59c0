"""Is the scheduler that would run here machine code (docs/adr/013)? Its sources are the same."""

from cluster import routing


def scheduler_is_compiled() -> bool:
    return not routing.__file__.endswith(".py")
