"""A plugin of pytest that writes each test's outcome, once it is known, as a line of JSON to the file that BATON_TOLD names."""

import json
import os
from pathlib import Path
from typing import Any

TOLD = "BATON_TOLD"


class _Told:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        why = str(report.longrepr).splitlines()[-1:] if report.failed else []
        with self._path.open("a") as file:
            file.write(
                json.dumps({"name": report.nodeid, "outcome": report.outcome, "why": "".join(why)}) + "\n"
            )

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.pytest_runtest_logreport(_Uncollected(report))


class _Uncollected:
    """A file that cannot be imported, as a test that has failed."""

    when, outcome, failed, passed = "call", "failed", True, False

    def __init__(self, report: Any) -> None:
        self.nodeid, self.longrepr = report.nodeid, report.longrepr


def pytest_configure(config: Any) -> None:
    """Workers of pytest-xdist tell the process that has started them."""
    if TOLD in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Told(Path(os.environ[TOLD])))
