"""`baton`: the entry point that names the subcommands and turns an operator's mistake into one line."""

import ast
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from core.errors import ConfigError

MODULES: Final = {
    "serve": "serve",
    "chat": "chat",
    "bench": "bench",
    "simulate": "simulate",
    "profile": "profile",
    "quantize": "quantize",
    "plan": "plan",
    "replay": "replay",
    "doctor": "doctor",
    "up": "ray_up",
    "down": "ray_up",
    "status": "ray_up",
    "deploy": "deploy",
    "top": "top",
    "models": "models",
    "rollout": "rollout",
    "pods": "pods",
}
"""By command, the module of `baton.cli` that has the function of that name."""

_PLAIN: Final[dict[str, Any]] = {"add_completion": False, "rich_markup_mode": None}
"""Rich would draw frames around the help, and takes as long to import as everything else that `--help` needs."""


class _Command(TyperCommand):
    """Imports its function when it is to run: some need PyTorch and Ray, which takes seconds. Until then it knows its help."""

    def __init__(self, name: str) -> None:
        super().__init__(name, help=_help(name))

    def make_context(self, *args: Any, **settings: Any) -> Any:
        return self._imported().make_context(*args, **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        return self._imported().get_params(ctx)

    def _imported(self) -> Any:
        name = self.name or ""
        one = typer.Typer(**_PLAIN)
        one.command()(getattr(import_module(f"baton.cli.{MODULES[name]}"), name))
        return typer.main.get_command(one)


def _help(name: str) -> str:
    """Return the docstring of a command's function, read from its file."""
    spec = find_spec(f"baton.cli.{MODULES[name]}")
    assert spec is not None
    assert spec.origin is not None
    parts = ast.parse(Path(spec.origin).read_bytes()).body
    function = next(part for part in parts if isinstance(part, ast.FunctionDef) and part.name == name)
    return ast.get_docstring(function) or ""


class _Commands(Mapping[str, Any]):
    """The commands, each made when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        return _Command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


class _Group(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        whole: dict[str, Any] = settings | {"commands": _Commands()}
        super().__init__(**whole)


app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, **_PLAIN)


@app.callback()
def about() -> None:
    """Baton serves large language models from separate pools of prefill and decode workers."""


def main() -> None:
    try:
        app()
    except ConfigError as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(2)
