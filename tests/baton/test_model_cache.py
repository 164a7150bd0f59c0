"""`baton models pull`, `rm` and `cached`, as a shell runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.pulling.fake_places import FakePlaces

ROOT = Path(__file__).parents[2]


def test_a_model_comes_is_listed_and_goes(tmp_path: Path) -> None:
    with FakePlaces().running() as places:
        own = {"BATON_CACHE_DIR": str(tmp_path), "HF_ENDPOINT": places.url, "COLUMNS": "200"}

        def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "baton.cli", "models", *arguments]
            return subprocess.run(
                command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False
            )

        pulled = baton("pull", "org/name").stdout.splitlines()
        assert pulled[0] == "pulling manifest"
        assert sorted(pulled[1:3]) == ["config.json 23 B of 23 B", "model.safetensors 3.1 MB of 3.1 MB"]
        assert pulled[-1].startswith(f"org/name is in {tmp_path}")
        assert [line.split() for line in baton("cached").stdout.splitlines()][1][:3] == [
            "org/name",
            "3.1",
            "MB",
        ]
        too_much = baton("pull", "modelscope://org/name", "--max-bytes", "3M")
        assert (too_much.returncode, too_much.stderr.splitlines()[0][:14]) == (2, "baton: modelsc")
        assert baton("rm", "org/name").stdout.strip() == "removed org/name: 3.1 MB"
        assert baton("rm", "org/name").returncode == 2


@pytest.mark.parametrize("given", ["nonsense", "/a/folder"])
def test_what_cannot_be_pulled_is_one_line(given: str) -> None:
    command = [sys.executable, "-m", "baton.cli", "models", "pull", given]
    got = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert got.returncode == 2
    assert got.stderr.startswith(f"baton: '{given}' cannot be pulled: give owner/name")
