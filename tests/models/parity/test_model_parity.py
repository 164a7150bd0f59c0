"""Some classes of transformers each day, beside what the table of all says of them."""

from dataclasses import replace

import pytest

from tests.models.parity.parity_case import Row, tried
from tests.models.parity.parity_table import PAGE, read_rows, with_table
from tests.models.parity.tiny_checkpoints import causal_names
from tests.turns import number_of_today

_EACH_DAY = 6


def todays() -> list[Row]:
    rows = read_rows()
    first = number_of_today() * _EACH_DAY
    return [rows[(first + at) % len(rows)] for at in range(_EACH_DAY)]


def test_the_page_has_the_table_that_was_measured() -> None:
    page = PAGE.read_text()
    assert with_table(page, read_rows()) == page


def test_the_table_has_every_causal_language_model_of_transformers() -> None:
    assert [row.architecture for row in read_rows()] == causal_names()


def test_at_least_85_percent_of_them_have_the_tokens_of_transformers() -> None:
    rows = read_rows()
    assert sum(row.result == "same" for row in rows) >= 0.85 * len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("row", todays(), ids=lambda row: row.architecture)
def test_a_class_of_today_gives_what_the_table_says(row: Row) -> None:
    assert replace(tried(row.architecture), reason="") == replace(row, reason="")
