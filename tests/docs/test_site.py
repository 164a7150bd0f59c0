"""The site of the documentation: it has every page once, its links resolve, and it shows what GitHub shows."""

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
import yaml
from markdown_it import MarkdownIt

from docs.site_markdown import for_python_markdown
from docs.site_pages import DECISIONS, OUTSIDE, Repository, decisions, outside, rewrite_links
from tests.clients.run_client import install_locked

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path for path in DOCS.rglob("*.md")} | {
    there: ROOT / path for path, there in outside().items() if there.endswith(".md")
}
"""Every page by its path on the site."""
REPOSITORY = "https://example.org/baton"
MADE_FROM_CODE = "python.md"
FENCES_ADD = {"chart.md"}
"""A page without a heading gets its name in the navigation."""


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml, and takes the default of what the environment may say."""


Settings.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node)[-1])  # type: ignore[arg-type]
SETTINGS: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)


def pages_in(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield from pages_in(decisions()) if entry == DECISIONS else [entry]
    else:
        for one in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_in(one)


def test_the_navigation_has_every_page_once() -> None:
    counted = Counter(pages_in(SETTINGS["nav"]))
    assert {page for page, times in counted.items() if times > 1} == set()
    assert set(counted) == set(PAGES)


def test_the_navigation_is_by_kind() -> None:
    kinds = [name for entry in SETTINGS["nav"] for name in entry]
    assert kinds[1:5] == ["Tutorial", "How to", "Explanation", "Reference"]


def test_pages_outside_docs_exist() -> None:
    assert [path for path in OUTSIDE if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("README.md", "docs/api.md#errors", "api.md#errors"),
        ("README.md", "docs/architecture/README.md", "architecture/README.md"),
        ("README.md", "docs/adr/", "adr/README.md"),
        ("README.md", "docs/dashboard.png", "dashboard.png"),
        ("README.md", "#five-minutes", "#five-minutes"),
        ("README.md", "https://example.org/x", "https://example.org/x"),
        ("docs/deploy.md", "../README.md", "index.md"),
        ("docs/deploy.md", "../examples/serve/baton.yaml", f"{REPOSITORY}/blob/v1/examples/serve/baton.yaml"),
        ("docs/deploy.md", "../locks", f"{REPOSITORY}/tree/v1/locks"),
        ("docs/adr/001-net-layer.md", "../../benchmarks/results/soak.svg", "../results/soak.svg"),
        ("benchmarks/results/engine.md", "soak.json", f"{REPOSITORY}/blob/v1/benchmarks/results/soak.json"),
        ("benchmarks/results/engine.md", "../../docs/adr/README.md", "../adr/README.md"),
    ],
)
def test_a_link_leads_to_a_page_of_the_site_or_to_the_repository(page: str, link: str, there: str) -> None:
    written = "[{0}]({0}) and `[code]({0})`\n\n```\n[code]({0})\n```\n"
    expected = written.format(link).replace(f"({link})", f"({there})", 1)
    assert rewrite_links(written.format(link), page, Repository(REPOSITORY, "v1")) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A list:\n- one\n- two\n", "A list:\n\n- one\n- two"),
        (
            "- one\n  goes on\n  - two\n    - three\n- four",
            "- one\n    goes on\n    - two\n        - three\n- four",
        ),
        ("1. one\n\n   more\n\nafter", "1. one\n\n    more\n\nafter"),
        ("1. one\n\n- two", "1. one\n\n\n<!-- another list -->\n\n- two"),
        ("A table:\n| a |\n|---|\n| `b\\|c` |", "A table:\n\n| a |\n|---|\n| <code>b&#124;c</code> |"),
        ("```\nno list:\n- one\n```", "```\nno list:\n- one\n```"),
    ],
)
def test_lists_and_tables_are_written_for_python_markdown(text: str, expected: str) -> None:
    assert for_python_markdown(text) == expected


MARKED = {"h1", "h2", "h3", "h4", "li", "ol", "ul", "table", "tr", "th", "td", "img", "blockquote"}


class Shown(HTMLParser):
    """What a page shows: its headings, items, cells and words, in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.parts += [f"<{tag}>"] if tag in MARKED else []
        self.links += [given["href"]] if tag == "a" and "href" in given else []
        self.loaded += [
            given[name] for name in ("src", "href") if tag in ("img", "script", "link") and name in given
        ]
        self.anchors |= {given[name] for name in ("id", "name") if name in given}

    def handle_data(self, data: str) -> None:
        self.parts.append(data)

    def words(self) -> str:
        return re.sub(r"\s+", "", "".join(self.parts)).replace("¶", "")


def content(text: str) -> str:
    """Return what is between a built page's head and foot, without the button that edits it."""
    found = re.search(r"<article[^>]*>(.*?)</article>", text, re.DOTALL)
    assert found is not None
    without = r'<a href="[^"]*" title="[^"]*" class="md-content__button.*?</a>|<svg.*?</svg>'
    return re.sub(without, "", found[1], flags=re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    install_locked("site", tools := tmp_path_factory.mktemp("tools"))
    (tools / ".ready").touch()
    folder = tmp_path_factory.mktemp("made") / "site"
    done = subprocess.run(
        ["make", "site", f"SITE={tools}", f"ARGS=--site-dir {folder}"],
        cwd=ROOT,
        env=os.environ | {"SITE_REPOSITORY": REPOSITORY},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def built(site: Path, page: str) -> Path:
    folder, _, name = page.rpartition("/")
    is_index = name in ("README.md", "index.md")
    return site / folder / ("" if is_index else name.removesuffix(".md")) / "index.html"


slow = [pytest.mark.slow, pytest.mark.turns(3, number=2), pytest.mark.timeout(600)]


class TestBuilt:
    pytestmark = slow

    def test_every_link_resolves_and_nothing_is_loaded_from_elsewhere(self, site: Path) -> None:
        shown = {path: Shown(path.read_text()) for path in site.rglob("index.html")}
        assert len(shown) == len(PAGES)
        wrong = [
            f"{path.relative_to(site)}: {link}"
            for path, one in shown.items()
            for link in [*one.links, *one.loaded]
            if not resolves(link, path, site, shown)
        ]
        assert wrong == []
        assert [link for one in shown.values() for link in one.loaded if "://" in link] == []

    def test_each_page_shows_what_github_shows(self, site: Path) -> None:
        github = MarkdownIt("commonmark", {"html": True}).enable("table")
        for page, source in PAGES.items():
            if page not in {MADE_FROM_CODE, *FENCES_ADD}:
                expected = Shown(github.render(source.read_text())).words()
                assert Shown(content(built(site, page).read_text())).words() == expected, page

    def test_seams_are_shown_with_signatures_and_docstrings(self, site: Path) -> None:
        words = Shown(content(built(site, MADE_FROM_CODE).read_text())).words()
        assert ":::" not in words
        for part in (
            "LLM(model:str=",
            "classOps",
            "PlacementPolicy",
            "WorkerGroup",
            "Amodelforofflinebatches:",
        ):
            assert part in words

    def test_the_search_knows_names_with_underscores_and_chinese(self, site: Path) -> None:
        index = json.loads((site / "search" / "search_index.json").read_text())
        separator = re.compile(index["config"]["separator"])
        words = {
            word for one in index["docs"] for word in separator.split(re.sub(r"<[^>]+>", " ", one["text"]))
        }
        assert {"drain_timeout_s", "预", "填", "充"} <= words


def resolves(link: str, page: Path, site: Path, shown: dict[Path, Shown]) -> bool:
    """Say whether a link leads to something. Of other hosts only the repository's files can be looked for."""
    address, anchor = urldefrag(link)
    if address.startswith(f"{REPOSITORY}/"):
        _, _, path = re.split(r"/(blob|tree|edit)/main/", address)
        return (ROOT / unquote(path)).exists()
    if re.match(r"[a-z]+:", address):
        return True
    target = Path(os.path.normpath(page.parent / unquote(address))) if address else page
    target = target / "index.html" if target.is_dir() else target
    if not target.is_relative_to(site) or not target.is_file():
        return False
    return not anchor or target not in shown or unquote(anchor) in shown[target].anchors
