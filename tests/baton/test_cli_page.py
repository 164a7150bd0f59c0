"""docs/cli.md is what the commands say of themselves."""

import re

from baton.cli.main import MODULES
from baton.cli_page import PAGE, page
from tests.e2e.cluster_process import ROOT


def test_the_page_is_generated_from_the_commands() -> None:
    assert PAGE.read_text() == page(), "run: make cli-page"


def test_every_command_has_a_section_with_its_usage() -> None:
    text = PAGE.read_text()
    assert re.findall(r"^## baton (\w+)$", text, re.MULTILINE) == list(MODULES)
    assert re.findall(r"^baton (\w+) ", text, re.MULTILINE) == list(MODULES)
    assert (ROOT / "docs" / "cli.md") == PAGE
