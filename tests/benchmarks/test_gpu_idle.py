"""What decode steps' idle share is of when they began and ended."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from benchmarks.gpu.decode_step import idle_share


def test_idle_is_what_no_span_covers_between_the_first_beginning_and_the_last_end() -> None:
    assert idle_share([(0, 4), (4, 8), (10, 20)]) == pytest.approx(0.1)
    assert idle_share([(10, 20), (0, 8), (2, 4)]) == pytest.approx(0.1), "in any order, and within each other"
    assert idle_share([(5, 6)]) == 0
    with pytest.raises(ValueError, match="no step"):
        idle_share([])
