"""What strangers make an ingress log: bounded for each of them and for all together, and said."""

import io
import json
import logging

import pytest
from pydantic import SecretStr

from cluster.deploy.log_limit import LogLimit
from cluster.deploy.process_logs import JsonFormatter, configure_logging
from cluster.ingress.tenants.access import Rules, TenantRules
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, SETTINGS, Api
from tests.deploy.test_process_logs import restored

__all__ = ["restored"]


class Log:
    """A logger with the limit, on a clock that stands."""

    def __init__(self) -> None:
        self.now = 0.0
        self._out = io.StringIO()
        handler = logging.StreamHandler(self._out)
        handler.setFormatter(JsonFormatter())
        handler.addFilter(LogLimit(lambda: self.now))
        self._logger = logging.Logger("cluster.test")
        self._logger.addHandler(handler)

    def refuse(self, client: str, num: int = 1) -> None:
        for _ in range(num):
            self._logger.warning("refused %s", client, extra={"audit": {"client": client}})

    def debug(self, num: int) -> None:
        for _ in range(num):
            self._logger.debug("a detail")

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._out.getvalue().splitlines()]


def test_a_flood_of_one_client_is_a_few_lines_and_hides_nobody() -> None:
    log = Log()
    log.refuse("10.0.0.1", 9000)
    assert len(log.lines()) < 50
    log.refuse("10.0.0.2")
    assert log.lines()[-1]["message"] == "refused 10.0.0.2"
    assert log.lines()[-1]["left_out"] == 9000 - (len(log.lines()) - 1)


def test_a_flood_of_many_clients_is_bounded_too() -> None:
    log = Log()
    for number in range(20_000):
        log.refuse(f"client-{number}")
    assert len(log.lines()) < 300
    log.now = 60.0
    log.refuse("10.0.0.1")
    assert log.lines()[-1]["message"] == "refused 10.0.0.1"


def test_details_for_debugging_are_all_written() -> None:
    log = Log()
    log.debug(5000)
    assert len(log.lines()) == 5000


async def test_anonymous_refusals_leave_kilobytes(restored: None, capfd: pytest.CaptureFixture[str]) -> None:
    """9,000 of them once left 4.2 MB in 5 s."""
    configure_logging("warning")
    made = Api(FakeGenerator(), SETTINGS, Rules(CLASSES, {"": TenantRules((SecretStr("k"),))}))
    for _ in range(600):
        assert (await made.http.get("/v1/models")).status_code == 401
    written = capfd.readouterr().err
    assert 0 < len(written) < 20_000
    counted = await made.http.get("/metrics", headers={"Authorization": "Bearer k"})
    assert 'baton_requests_refused_total{reason="invalid_api_key",tenant=""} 600.0' in counted.text
