"""Markdown for Python-Markdown, which reads some of what GitHub reads otherwise.

It wants an empty line before a list or a table, and four columns for each level of a list. It shows the backslash of a pipe that
is code in a table."""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass

ITEM = re.compile(r"( *)((?:[-*+]|\d+[.)]) +)\S")
FENCE = re.compile(r" *(```|~~~)")
RULE = re.compile(r"\|[-:| ]+\|$")
CODE_IN_CELL = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
LEVEL = "    "


def for_python_markdown(text: str) -> str:
    """Return `text` as Python-Markdown must have it to show what GitHub shows."""
    return "\n".join(_Lists().lines(list(_with_tables(text.splitlines()))))


def _with_tables(lines: list[str]) -> Iterator[str]:
    """Yield lines with an empty one before each table, and code with pipes as HTML within it."""
    is_code = False
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        is_code ^= FENCE.match(line) is not None
        if is_code or not line.startswith("|"):
            yield line
            continue
        if RULE.match(after) and before.strip():
            yield ""
        yield CODE_IN_CELL.sub(_code, line)


def _code(found: re.Match[str]) -> str:
    return f"<code>{html.escape(found[1].replace(chr(92) + '|', '|'), quote=False).replace('|', '&#124;')}</code>"


@dataclass(frozen=True, slots=True)
class _Level:
    column: int
    """Where its items begin."""
    text_column: int
    """Where their text begins."""
    is_numbered: bool


class _Lists:
    """Sets off lists, and indents them by their level."""

    def __init__(self) -> None:
        self._open: list[_Level] = []

    def lines(self, lines: list[str]) -> Iterator[str]:
        is_code, before = False, ""
        for line in lines:
            is_fence, was_code = FENCE.match(line) is not None, is_code
            is_code ^= is_fence
            item = None if was_code or is_fence else ITEM.match(line)
            if item is not None:
                yield from self._begun(item, after_text=bool(before.strip()))
            elif line.strip():
                is_lazy = bool(before.strip()) and not was_code and not is_fence
                yield self._indented(line, is_lazy=is_lazy)
            else:
                yield line
            before = line

    def _begun(self, item: re.Match[str], *, after_text: bool) -> Iterator[str]:
        """Yield the first line of an item, and before it what sets its list off."""
        column, is_numbered = len(item[1]), item[2][0].isdigit()
        while self._open and column < self._open[-1].text_column and column != self._open[-1].column:
            self._open.pop()
        if not self._open and after_text:
            yield ""
        if self._open and column == self._open[-1].column and self._open.pop().is_numbered != is_numbered:
            yield from ("", "<!-- another list -->", "")
        yield LEVEL * len(self._open) + item.string.lstrip()
        self._open.append(_Level(column, column + len(item[2]), is_numbered))

    def _indented(self, line: str, *, is_lazy: bool) -> str:
        column = len(line) - len(line.lstrip())
        while self._open and column < self._open[-1].text_column and not is_lazy:
            self._open.pop()
        if not self._open:
            return line
        return LEVEL * len(self._open) + line[min(column, self._open[-1].text_column) :]
