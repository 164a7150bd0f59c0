"""The table of what strangers can fill names a test for each row."""

import re

from tests.e2e.cluster_process import ROOT

TABLE = (
    (ROOT / "docs" / "security.md")
    .read_text()
    .partition("## What a stranger can fill")[2]
    .partition("\n## ")[0]
)


def test_each_row_names_a_test_that_there_is() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        named = re.search(r"`(tests/\S+\.py)::(test_\w+)` \|$", row)
        assert named is not None, row
        assert f"def {named[2]}(" in (ROOT / named[1]).read_text(), row
