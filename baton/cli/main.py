"""`baton`: the entry point that names the subcommands and turns an operator's mistake into one line."""

import sys

import typer

from baton.cli.bench import bench
from baton.cli.chat import chat
from baton.cli.deploy import deploy
from baton.cli.doctor import doctor
from baton.cli.plan import plan
from baton.cli.profile import profile
from baton.cli.ray_up import down, status, up
from baton.cli.replay import replay
from baton.cli.rollout import rollout
from baton.cli.serve import serve
from baton.cli.simulate import simulate
from baton.cli.top import top
from core.errors import ConfigError

app = typer.Typer(
    help="Baton serves large language models from separate pools of prefill and decode workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(chat)
app.command()(bench)
app.command()(simulate)
app.command()(profile)
app.command()(plan)
app.command()(replay)
app.command()(doctor)
app.command()(up)
app.command()(down)
app.command()(status)
app.command()(deploy)
app.command()(top)
app.command()(rollout)


def main() -> None:
    try:
        app()
    except ConfigError as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(2)
