"""The status page in headless Chromium: what it shows is what /cluster says, and it asks nobody else."""

import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from matplotlib.image import imread

from tests.cluster.ingress.observability.conftest import METRICS_KEY, headers, load
from tests.e2e.cluster_process import ServeProcess
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium (.ci/apt.txt)"),
]


class Page(HTMLParser):
    """Text of each table's cells, by the table's id; text of the elements with ids; ids of hidden elements; `data-` attributes."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.dom = dom
        self.data = defaultdict[str, list[str]](list)
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, str] = {}
        self.hidden: set[str] = set()
        self._table = self._id = ""
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._id = found.get("id") or (self._id if tag in ("span", "dt", "dd") else "")
        if "hidden" in found and found.get("id"):
            self.hidden.add(str(found["id"]))
        for name, value in attrs:
            if name.startswith("data-"):
                self.data[name.removeprefix("data-")].append(str(value))
        if tag == "table":
            self._table = str(found.get("id"))
            self.tables[self._table] = []
        if tag == "tr":
            self.tables[self._table].append([])
        if tag in ("td", "th"):
            self.tables[self._table][-1].append("")

    def handle_data(self, data: str) -> None:
        if self._table and self.tables[self._table] and self.tables[self._table][-1]:
            self.tables[self._table][-1][-1] += data
        if self._id:
            self.texts[self._id] = self.texts.get(self._id, "") + data

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._table = ""
        if tag in ("span", "p", "h1", "h2"):
            self._id = ""


def chromium(profile: Path, *options: str, url: str) -> str:
    command = [
        *(
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ),
        *(f"--user-data-dir={profile}", "--virtual-time-budget=6000", "--enable-logging=stderr", "--v=0"),
        *options,
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr or "401" in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def busy(server: ServeProcess) -> Iterator[ServeProcess]:
    with load(server) as num_asked:
        while num_asked() < 8:
            time.sleep(0.05)
        yield server


def test_it_shows_instances_classes_and_links(busy: ServeProcess, tmp_path: Path) -> None:
    page = Page(chromium(tmp_path, "--dump-dom", url=f"{busy.base_url}/dashboard#key={METRICS_KEY}"))
    status = httpx.get(f"{busy.base_url}/cluster", headers=headers(METRICS_KEY), timeout=PATIENCE_S).json()
    assert page.texts["state"] == "accepting requests"
    assert "trouble" in page.hidden
    assert "ask" in page.hidden
    assert sorted(page.data["address"]) == sorted(one["address"] for one in status["instances"])
    assert page.dom.count(">serving<") == len(status["instances"])
    assert re.search(r"→ loopback:decode-\d: [\d.,]+ [kMG]?B/s by loopback, ", page.dom)
    heading, *classes = page.tables["classes"]
    assert heading[:2] == ["class", "attainment"]
    assert {row[0] for row in classes} <= {"chat", "batch", "standard"}
    assert {row[0] for row in classes} >= {"chat", "batch"}
    assert all(re.fullmatch(r"\d+(\.\d)? %", row[1]) for row in classes)
    _, *routes = page.tables["routes"]
    assert "/v1/completions" in {row[0] for row in routes}
    heading, *starts = page.tables["starts"]
    assert sorted(row[1] for row in starts) == sorted(one["address"] for one in status["instances"])
    phases = heading[3:-2]
    for one in status["instances"]:
        (row,) = (row for row in starts if row[1] == one["address"])
        assert dict(zip(phases, row[3:-2], strict=True)) == {
            phase: f"{seconds:.2f}" for phase, seconds in one["start"]["phases"]
        }
        assert row[2] == f"{sum(seconds for _, seconds in one['start']['phases']):.2f}"
        assert re.fullmatch(r"[\d.,]+ MB", row[-2])
        assert re.fullmatch(r"[\d.,]+ [kMG]B/s", row[-1])
    assert set(page.data["class"]) == {row[0] for row in classes}, "each has its charts"
    assert page.dom.count("<figure>") == 3 * len(classes)
    _, *slowest = page.tables["slowest"]
    assert [row[1] for row in slowest] == page.data["id"][: len(slowest)]
    assert all(row[7] for row in slowest), "each says why"
    _, *failed = page.tables["failed"]
    assert {row[0] for row in failed} == {"nothing yet"}, (
        "a tenant's limit is no failure of a request that ran"
    )


def test_a_link_to_a_request_shows_what_happened_to_it(busy: ServeProcess, tmp_path: Path) -> None:
    asked = f"{busy.base_url}/cluster/requests"
    found = httpx.get(asked, headers=headers(METRICS_KEY), timeout=PATIENCE_S).json()["slowest"][0]
    url = f"{busy.base_url}/dashboard#key={METRICS_KEY}&request={found['client_id']}"
    page = Page(chromium(tmp_path, "--dump-dom", url=url))
    assert page.texts["h-request"] == found["client_id"]
    assert found["why"] in page.dom
    assert 'class="part decode"' in page.dom


def test_without_a_key_it_asks_for_one_and_shows_nothing(server: ServeProcess, tmp_path: Path) -> None:
    page = Page(chromium(tmp_path, "--dump-dom", url=f"{server.base_url}/dashboard"))
    assert page.texts["trouble"] == "this server asks for an API key"
    assert "ask" not in page.hidden
    assert not page.data["address"]


def test_it_is_one_file_that_may_reach_nothing_else(server: ServeProcess) -> None:
    answer = httpx.get(f"{server.base_url}/dashboard", timeout=PATIENCE_S)
    assert answer.status_code == 200
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_nothing_runs_off_a_phone(busy: ServeProcess, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    # Chromium's windows are 500 pixels wide at least.
    options = ["--window-size=500,3000", f"--screenshot={picture}", "--hide-scrollbars"]
    chromium(tmp_path / "profile", *options, url=f"{busy.base_url}/dashboard#key={METRICS_KEY}")
    image = imread(picture)[:, :, :3]
    assert image.shape[1] == 500
    assert (image[:, -8:] == image[0, -1]).all(), "the margin is bare"


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_painted_light_and_dark(busy: ServeProcess, tmp_path: Path, dark: bool) -> None:
    picture = tmp_path / "page.png"
    options = ["--window-size=1200,760", f"--screenshot={picture}", "--hide-scrollbars"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    chromium(tmp_path / "profile", *options, url=f"{busy.base_url}/dashboard#key={METRICS_KEY}")
    image = imread(picture)[:, :, :3]
    assert image.shape[:2] == (760, 1200)
    assert image.mean() < 0.3 if dark else image.mean() > 0.8
