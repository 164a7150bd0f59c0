"""One server for all examples that ask one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster_process import ServeProcess, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    log: Path = tmp_path_factory.mktemp("server") / "log"
    settings = ("--set", "model.pooling=mean", "--set", f"serve.store=sqlite:///{log.parent / 'store.db'}")
    with serving("--local", "--prefill", "0", "--tool-call-parser", "hermes", *settings, log=log) as server:
        yield server
