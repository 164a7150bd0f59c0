"""`python -m baton.cli_page`: writes docs/cli.md, the reference of the command line, from the commands themselves."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from baton.cli.main import MODULES, app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
_HEAD = """# The command line

Each command of `baton`, with its arguments and options. This page is generated from the commands: `make cli-page`.
`baton COMMAND --help` prints the same in a terminal.

"""


def page() -> str:
    """Return the page as the commands are today."""
    group: Any = typer.main.get_command(app)
    whole = group.make_context("baton", [], resilient_parsing=True)
    commands = {name: group.get_command(whole, name) for name in MODULES}
    index = [
        f"| [`baton {name}`](#baton-{name}) | {_first_sentence(one.help)} |" for name, one in commands.items()
    ]
    sections = [_section(name, one) for name, one in commands.items()]
    return _HEAD + "\n".join(["| command | |", "|---|---|", *index, ""]) + "".join(sections)


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["baton", name, *command.collect_usage_pieces(context)])
    rows = "\n".join(_rows(command, context))
    table = f"\n| | meaning |\n|---|---|\n{rows}\n" if rows else ""
    return f"\n## baton {name}\n{_text(command.help)}\n\n```\n{usage}\n```\n{table}"


def _rows(command: Any, context: Any) -> Iterator[str]:
    for one in command.get_params(context):
        record = one.get_help_record(context)
        if record is not None and record[0] != "--help":
            names, meaning = record
            yield f"| {_code(names)} | {_text(meaning)} |"


def _code(names: str) -> str:
    escaped = " ".join(names.split()).replace("|", "\\|")
    return f"`{escaped}`"


def _text(words: str) -> str:
    """Return a help text as Markdown of one line: what looks like a tag is a word."""
    return re.sub(r"(?<!`)<(\w+)>", r"&lt;\1&gt;", " ".join(words.split())).replace("|", "\\|")


def _first_sentence(words: str) -> str:
    return _text(re.split(r"(?<=\.)\s", words.strip(), maxsplit=1)[0])


if __name__ == "__main__":
    PAGE.write_text(page())
