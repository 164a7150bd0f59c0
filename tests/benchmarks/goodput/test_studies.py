"""One command has all studies of goodput, and says which there are."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import goodput
from benchmarks.goodput.__main__ import STUDIES, main

FOLDER = Path(str(goodput.__file__)).parent


def test_every_study_is_asked_for_by_its_name() -> None:
    studies = {path.stem for path in FOLDER.glob("[a-z]*.py") if "def main()" in path.read_text()}
    assert studies == set(STUDIES)
    assert all(callable(import_module(f"benchmarks.goodput.{name}").main) for name in STUDIES)


@pytest.mark.parametrize("words", [[], ["nothing"]])
def test_who_names_none_is_told_of_all(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["goodput", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    lines = str(ended.value.code).splitlines()
    assert {line.split()[0] for line in lines[-len(STUDIES) :]} == set(STUDIES)
