"""What `baton serve` says to type next can be typed."""

from pathlib import Path

import pytest

from baton.cli.serve import as_called


def program(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "baton"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_program_is_named_as_a_shell_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = program(tmp_path / "ours"), program(tmp_path / "other")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert as_called(str(ours)) == str(ours)
    monkeypatch.setenv("PATH", str(other.parent))
    assert as_called(str(ours)) == str(ours)
    monkeypatch.setenv("PATH", str(ours.parent))
    assert as_called(str(ours)) == "baton"


def test_a_module_that_runs_as_a_program_has_the_programs_name() -> None:
    assert as_called("/somewhere/baton/cli/__main__.py") == "baton"
