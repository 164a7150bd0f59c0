"""Says plainly when another distribution shadows one of Baton's top-level packages, which have short names."""

from importlib.util import find_spec
from pathlib import Path

from core.errors import ConfigError

PACKAGES = (
    "baton", "cluster", "core", "decode", "device", "engine", "kernels", "kvtransfer", "models", "net", "parallel",
    "prefill", "sim",
)  # fmt: skip


def check_own_tree() -> None:
    """Raise ConfigError when one of our packages would be loaded from somewhere else."""
    root = Path(__file__).resolve().parent.parent
    for name in PACKAGES:
        spec = find_spec(name)
        where = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if where != root:
            raise ConfigError(
                f"the package {name!r} is loaded from {where or 'nowhere'}, not from Baton's own tree {root}: "
                "install Baton into an environment of its own"
            )
