"""Processes that tests fork from one that has imported the code once, since the import takes several seconds of a processor."""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
PRELOADED = [
    "tests.transformers_code",
    "tests.chaos.node",
    "engine.ranks.rank_process",
    "models.hf.transformers_model",
    "tests.contract.transports",
    "tests.models.checkpoints",
    "tests.parallel.memory_server_child",
    "tests.parallel.simulated_child",
    "tests.frozen_modules",
]
"""A test process has one server that forks, and it imports what it was told last: so everything is named here."""
FORKED.set_forkserver_preload(PRELOADED)
