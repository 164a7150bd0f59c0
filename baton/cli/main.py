"""`baton`: the entry point that names the subcommands and turns an operator's mistake into one line."""

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperGroup

from core.errors import ConfigError

_MODULES: Final = {
    "serve": "serve",
    "chat": "chat",
    "bench": "bench",
    "simulate": "simulate",
    "profile": "profile",
    "plan": "plan",
    "replay": "replay",
    "doctor": "doctor",
    "up": "ray_up",
    "down": "ray_up",
    "status": "ray_up",
    "deploy": "deploy",
    "top": "top",
    "rollout": "rollout",
}
"""By command, what of `baton.cli` has the function of that name."""


class _Commands(Mapping[str, Any]):
    """Imports a command when it is asked for: some need PyTorch and Ray, which takes seconds, and most do not."""

    def __getitem__(self, name: str) -> Any:
        one = typer.Typer(add_completion=False)
        one.command()(getattr(import_module(f"baton.cli.{_MODULES[name]}"), name))
        return typer.main.get_command(one)

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class _Group(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        whole: dict[str, Any] = settings | {"commands": _Commands()}
        super().__init__(**whole)


app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """Baton serves large language models from separate pools of prefill and decode workers."""


def main() -> None:
    try:
        app()
    except ConfigError as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(2)
