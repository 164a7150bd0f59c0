import json
import logging
import sys

import pytest

from cluster.deploy.process_logs import JsonFormatter, configure_logging
from cluster.ingress.telemetry import request_context
from core.errors import ConfigError
from tests.e2e.cluster_process import ROOT


@pytest.fixture
def restored():
    before = {logger: (logger.handlers[:], logger.level, logger.propagate) for logger in loggers()}
    yield
    for logger in loggers():
        logger.handlers[:], level, logger.propagate = before.get(logger, ([], logging.NOTSET, True))
        logger.setLevel(level)


def loggers() -> list[logging.Logger]:
    """All that there are by now."""
    made = logging.root.manager.loggerDict.values()
    return [logging.root, *(each for each in made if isinstance(each, logging.Logger))]


def test_a_json_line_bears_the_request_id_and_what_went_wrong() -> None:
    log = logging.getLogger("cluster.test")
    token = request_context.request_id.set("r-1")
    try:
        raise ValueError("odd")
    except ValueError:
        record = log.makeRecord(log.name, logging.ERROR, "f", 1, "line one\nline %d", (2,), sys.exc_info())
    text = JsonFormatter().format(record)
    request_context.request_id.reset(token)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["message"], line["level"], line["request_id"]) == ("line one\nline 2", "error", "r-1")
    assert "ValueError: odd" in line["exception"]
    assert "request_id" not in json.loads(JsonFormatter().format(record))


def test_refusals_and_starts_are_logged_at_any_level(
    restored: None, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logging("error", "json")
    logging.getLogger("cluster.ingress.delivery.frontend").warning("not shown")
    logging.getLogger("cluster.ingress.http.audit").warning("refused", extra={"audit": {"tenant": "acme"}})
    logging.getLogger("cluster.instance.instance").info("started")
    refused, started = map(json.loads, capfd.readouterr().err.splitlines())
    assert refused["audit"] == {"tenant": "acme"}
    assert started["message"] == "started"
    with pytest.raises(ConfigError):
        configure_logging("loud")


def test_every_package_logs_in_one_form(restored: None, capfd: pytest.CaptureFixture[str]) -> None:
    """A package that is left out would write to stderr by Python's own rules: warnings alone, and never as JSON."""
    packages = [
        path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("tests", "benchmarks")
    ]
    served = {
        folder.name
        for folder in packages
        if any("getLogger(__name__)" in path.read_text() for path in folder.rglob("*.py"))
    }
    assert {"cluster", "engine", "kernels"} <= served
    configure_logging("info", "json")
    for package in served:
        logging.getLogger(f"{package}.some.module").info("here")
    lines = map(json.loads, capfd.readouterr().err.splitlines())
    assert {line["logger"].partition(".")[0] for line in lines} == served
