"""`baton`: the entry point that names the subcommands and turns an operator's mistake into one line."""

import sys
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


class _Commands(TyperGroup):
    """Imports a command when it is asked for: some need PyTorch and Ray, which takes seconds, and most do not."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """None: there is no such command."""
        if cmd_name not in _MODULES:
            return None
        one = typer.Typer(add_completion=False)
        one.command()(getattr(import_module(f"baton.cli.{_MODULES[cmd_name]}"), cmd_name))
        return typer.main.get_command(one)


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def baton() -> None:
    """Baton serves large language models from separate pools of prefill and decode workers."""


def main() -> None:
    try:
        app()
    except ConfigError as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(2)
