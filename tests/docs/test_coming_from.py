"""docs/coming-from.md: what its tables offer exists."""

import json
import re
from pathlib import Path

import pytest

from baton.cli.serve_options import KEYS, flag

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming-from.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and "`" in line
]
KNOWN_KEYS = set(json.loads((ROOT / "tests/core/config/config_keys.json").read_text()))
FLAGS = {*map(flag, KEYS), "--set", "--local", "--config"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_options_and_keys_of_batons_side_exist(row: list[str]) -> None:
    theirs, ours = row
    for code in re.findall(r"`([^`]+)`", ours):
        assert not (unknown := set(re.findall(r"--[a-z][a-z-]*", code)) - FLAGS), (theirs, unknown)
        keys = re.findall(r"\b((?:engine|model|serve|transfer|schedule)\.[a-z_]+)", code)
        assert not (unknown := set(keys) - KNOWN_KEYS), (theirs, unknown)


def test_the_page_has_all_four() -> None:
    assert re.findall(r"^## From (\w+)", PAGE, re.MULTILINE) == ["vLLM", "SGLang", "OpenAI", "Ollama"]
    assert len(ROWS) > 35
