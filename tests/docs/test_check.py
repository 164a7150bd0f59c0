"""The pages name only what exists, and show what is drawn."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "docs/check.py"), str(root)], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "room").mkdir()
    (tmp_path / "room/door.py").write_text(
        'class Door:\n    """A Window it is not."""\n    def open_it(self) -> None: ...\n'
    )
    (tmp_path / "room/README.md").write_text("# The room\n## Its door, `Door`\n")
    return tmp_path


def test_pages_of_this_project_name_only_what_exists() -> None:
    result = check(ROOT)
    assert result.returncode == 0, result.stdout


def test_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    folder = ROOT / "docs/pictures"
    for script, target in (("draw.py", tmp_path), ("rooms.py", tmp_path / "rooms.svg")):
        subprocess.run([sys.executable, "-B", str(folder / script), str(target)], check=True, timeout=120)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in folder.glob("*.svg")}


def test_what_exists_is_not_reported(project: Path) -> None:
    (project / "README.md").write_text(
        "[a](room/README.md) [b](room/README.md#its-door-door) [c](https://example.org/x) [d](#title)\n"
        "# Title\n`room/door.py` `room/` `room/{door,door}.py` `room/*.py` `Door.open_it` `door.py` `n/a` `1/2`\n"
        "```\n[not a link](nowhere.md) `no/file.py`\n```\n"
    )
    result = check(project)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "text",
    [
        "[a](nowhere.md)",
        "![a](room/nothing.svg)",
        '<img src="room/nothing.svg">',
        "[a](room/README.md#cellar)",
        "[a](#cellar)",
        "`room/window.py`",
        "`room/{door,window}.py`",
        "`room/window`",
        "`cellar/`",
        "`window.py`",
        "`Window`",
        "`Door.shut`",
    ],
)
def test_what_does_not_exist_is_reported_with_its_page(project: Path, text: str) -> None:
    (project / "room/page.md").write_text(text)
    result = check(project)
    assert result.returncode == 1
    assert result.stdout.startswith("room/page.md: ")
    assert len(result.stdout.splitlines()) == 1
