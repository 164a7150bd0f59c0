import logging

import pytest

from engine.ranks.child_ranks import Child


def test_what_a_rank_logs_is_in_its_instances_log_at_its_own_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, "engine.ranks.rank_logs"):
        rank = Child("rank 1 of 2", "tests.parallel.talking_child")
        how = rank.obituary()
        rank.end()
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == [
        ("INFO", "rank 1 of 2: models.formats.checkpoint: loaded"),
        ("WARNING", "rank 1 of 2: models.formats.checkpoint: slow disk"),
        ("WARNING", "rank 1 of 2: RuntimeError: no luck"),
    ]
    assert how.endswith("RuntimeError: no luck")
