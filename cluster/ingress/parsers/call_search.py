"""Where calls begin and end within text: at marks, and where models leave the marks out."""

from collections.abc import Sequence

from cluster.ingress.parsers.argument_values import Schemas
from cluster.ingress.parsers.character_source import CharacterSource
from cluster.ingress.parsers.json_calls import call_object
from cluster.ingress.parsers.json_text import Malformed
from cluster.ingress.parsers.markup_parser import EndOfText, EventWriter, Steps

NOISE = " \t\r\n}];,"
"""What models write too much behind a call, when the call's end or another one follows."""
_ENDS_LINE = frozenset("\n,;]")
"""What stands behind a call that has no marks."""


class CallSearch:
    """Shows text up to where a call may begin."""

    def __init__(
        self, writer: EventWriter, marks: Sequence[str], *, on_lines: str = "", anywhere: str = ""
    ) -> None:
        """Calls begin with one of `marks`, with a character of `on_lines` that begins a line, or with one of `anywhere`."""
        self._writer, self._marks = writer, tuple(marks)
        self._on_lines, self._anywhere = on_lines, anywhere
        self._breaks = frozenset([mark[0] for mark in marks] + list(on_lines) + list(anywhere))
        self.at_line_start = True

    def next(self) -> Steps[str]:
        """Return the mark, or the character."""
        held = ""
        try:
            while True:
                run = yield None if held else self._breaks
                if not held and run[0] not in self._breaks:
                    self._show(run)
                    continue
                held += run
                if held in self._marks:
                    return held
                while held and not any(mark.startswith(held) for mark in self._marks):
                    first, held = held[0], held[1:]
                    if first in self._anywhere or (self.at_line_start and first in self._on_lines):
                        self._writer.unread(held)
                        return first
                    self._show(first)
        except EndOfText:
            self._writer.text(held)
            raise

    def _show(self, text: str) -> None:
        self._writer.text(text)
        _, newline, last = text.rpartition("\n")
        self.at_line_start = not last.strip() and (bool(newline) or self.at_line_start)


def behind_call(
    writer: EventWriter, ends: Sequence[str], *, more: str = "", noise: str = NOISE
) -> Steps[str]:
    """Take one of `ends`, or `more`, off what follows a call, with white space and superfluous brackets before it, and return it.
    Returns nothing where something else follows, which stays as it is."""
    held = ""
    while True:
        held += yield None
        begun = held.lstrip(noise)
        if begun and (begun in ends or begun == more):
            return begun
        if begun and not any(end.startswith(begun) for end in (*ends, more)):
            writer.unread(held)
            return ""


class HeldCall:
    """A call that may turn out to be text. Nobody sees it before `write_to`."""

    def __init__(self) -> None:
        self._name = ""
        self._arguments: list[str] = []

    def begin_call(self, name: str) -> None:
        self._name = name

    def arguments(self, text: str) -> None:
        self._arguments.append(text)

    def complete_arguments(self) -> None: ...

    def write_to(self, writer: EventWriter) -> None:
        writer.begin_call(self._name)
        writer.arguments("".join(self._arguments))
        writer.complete_arguments()
        writer.end_call()


def unmarked_objects(
    writer: EventWriter, source: CharacterSource, schemas: Schemas, first: str, end: str
) -> Steps[None]:
    """Read a call, or a list of calls, that begins with `first` and has no mark before it. It is one where it names a tool, has
    arguments, and `end` or the text's end follows. Raises Malformed."""
    calls: list[HeldCall] = []
    opening = (yield from source.skip_space()) if first == "[" else first
    while opening == "{":
        calls.append(HeldCall())
        yield from call_object(calls[-1], source, schemas, known_only=True, needs_arguments=True)
        if first != "[":
            break
        behind = yield from source.skip_space()
        opening = (yield from source.skip_space()) if behind == "," else behind
    if not calls or (first == "[" and opening != "]"):
        raise Malformed
    yield from ends_with(source, end)
    for call in calls:
        call.write_to(writer)
    source.settle()


def ends_with(source: CharacterSource, end: str) -> Steps[None]:
    """Read white space up to `end` or the text's end. Raises Malformed where something else follows."""
    try:
        yield from source.skip_space()
    except EndOfText as ended:
        if ended.cut:
            raise
        return
    source.unread(1)
    if not end or not (yield from source.follows(end)):
        raise Malformed


def ends_line(source: CharacterSource) -> Steps[None]:
    """Read white space up to the end of a line, of a list or of the text, which is not read. Raises Malformed elsewhere."""
    try:
        behind = yield from source.read()
        while behind in " \t\r":
            behind = yield from source.read()
        source.unread(1)
        if behind not in _ENDS_LINE:
            raise Malformed
    except EndOfText as ended:
        if ended.cut:
            raise


def tool_name(source: CharacterSource, first: str, schemas: Schemas) -> Steps[str]:
    """Read a tool's name that begins with `first`. Raises Malformed where none stands there."""
    name = first
    while any(known.startswith(name) for known in schemas):
        character = yield from source.read()
        if not any(known.startswith(name + character) for known in schemas):
            source.unread(1)
            break
        name += character
    if name not in schemas:
        raise Malformed
    return name


def first_letters(schemas: Schemas) -> str:
    return "".join({name[0] for name in schemas if name})
