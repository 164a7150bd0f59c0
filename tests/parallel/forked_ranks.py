"""Ranks for many servers in a row, forked: starting a rank as an instance does takes it several seconds of a processor."""

from collections.abc import Sequence

import psutil

from engine.ranks.rank import Rank, rank_name
from engine.ranks.rank_messages import RankSetup
from engine.ranks.rank_process import serve_instance
from tests.parallel.forked_child import ForkedChild, forked_children


def start_forked(setups: Sequence[RankSetup], deadline_s: float) -> list[Rank]:
    """engine.ranks.rank.Start."""
    return [ForkedChild(rank_name(setup), serve_instance) for setup in setups]


def forked_ranks() -> list[psutil.Process]:
    """Return the living ones in the order in which they were started."""
    return forked_children(serve_instance)
