"""Write the index of the decision records: `python docs/adr_index.py` makes docs/adr/README.md again."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "adr"
TITLE = re.compile(r"# (\d{3}): (.+)")
STATUS = re.compile(
    r"\*\*Status\.\*\* Accepted, (\d{1,2} [A-Z][a-z]+ 20\d\d)(?:; (superseded) by \[ADR (\d{3})\])?"
)
HEAD = """# Decision records

One page a decision. A new record takes the next number, states its status and date in the third line, and is listed here by
`python docs/adr_index.py`. A record that no longer holds says which one supersedes it, and is in the archive.

| | decision | date |
|---|---|---|
"""
ARCHIVE = """
## Archive

| | decision | date | superseded by |
|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Record:
    path: Path
    number: str
    title: str
    date: str
    superseded_by: str
    """The number of a record; empty where this one holds."""


def records() -> Iterator[Record]:
    """Yield all records by number. Raises ValueError for one without a title, status or date, or in the wrong folder."""
    for path in sorted(FOLDER.rglob("[0-9]*.md"), key=lambda path: path.name):
        first, _, third, *_ = path.read_text().splitlines()
        title, status = TITLE.fullmatch(first), STATUS.match(third)
        if title is None or status is None:
            raise ValueError(
                f"{path.name}: the first line must be `# NUMBER: TITLE`, the third `**Status.** Accepted, DAY MONTH YEAR`"
            )
        if bool(status[3]) != (path.parent.name == "archive"):
            raise ValueError(f"{path.name}: superseded records, and no others, lie in {FOLDER.name}/archive")
        yield Record(path, title[1], title[2], status[1], status[3] or "")


def page() -> str:
    found = list(records())
    by_number = {record.number: record for record in found}
    holding = [f"{_row(record)} |" for record in found if not record.superseded_by]
    archived = [
        f"{_row(record)} | [{other}]({by_number[other].path.relative_to(FOLDER)}) |"
        for record in found
        if (other := record.superseded_by)
    ]
    return HEAD + "\n".join(holding) + "\n" + ARCHIVE + "\n".join(archived) + "\n"


def _row(record: Record) -> str:
    title = f"{record.title[0].upper()}{record.title[1:]}"
    return f"| {record.number} | [{title}]({record.path.relative_to(FOLDER)}) | {record.date}"


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page())
