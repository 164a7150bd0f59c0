"""The pages of the site that are not below docs/, and links as the site needs them.

A link to a page of the site becomes the address of that page there, and a link to any other file of the repository the address of
that file in the repository. Nothing here needs mkdocs."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from docs.adr_index import records
from docs.check import FENCE, LINK

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "reporting.md",
    "charts/README.md": "chart.md",
    "examples/README.md": "examples.md",
    "examples/load-balancer/README.md": "load-balancers.md",
    "models/embedded/README.md": "embedded-model.md",
    "models/embedded/draft/README.md": "embedded-draft.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""By path in the repository, the path on the site of a page outside docs/."""
FOLDERS = {"benchmarks/results": "results"}
"""Folders whose pages and pictures are all part of the site."""
PICTURES = {".png", ".svg"}
DECISIONS = "adr/"
"""The entry of the navigation that stands for the list of decision records."""
CODE_OR_FENCE = re.compile(f"{FENCE.pattern}|`[^`\\n]+(?:\\n[^`\\n]+)*`", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Repository:
    """Where files are that are no pages."""

    url: str
    revision: str

    def address(self, path: Path) -> str:
        kind = "tree" if path.is_dir() else "blob"
        return f"{self.url}/{kind}/{self.revision}/{path.relative_to(ROOT).as_posix()}"


def outside() -> dict[str, str]:
    """Return the files outside docs/ that are part of the site, each with its path there."""
    found = dict(OUTSIDE)
    for folder, there in FOLDERS.items():
        for path in sorted((ROOT / folder).iterdir()):
            if path.suffix in {".md", *PICTURES}:
                found[f"{folder}/{path.name}"] = f"{there}/{path.name}"
    return found


def site_path(path: Path, others: dict[str, str]) -> str | None:
    """Return the path on the site of a file of the repository, or None if it is not part of the site."""
    name = path.relative_to(ROOT).as_posix()
    if name in others:
        return others[name]
    is_part = path.suffix == ".md" or path.suffix in PICTURES
    return name.removeprefix(f"{DOCS}/") if name.startswith(f"{DOCS}/") and is_part else None


def rewrite_links(text: str, page: str, repository: Repository) -> str:
    """Return the Markdown of `page`, a path in the repository, with links as they must be on the site."""
    others = outside()
    here = site_path(ROOT / page, others)
    if here is None:
        raise ValueError(f"{page} is not part of the site: name it in docs/site_pages.py")

    code = [found.span() for found in re.finditer(CODE_OR_FENCE, text)]

    def replace(link: re.Match[str]) -> str:
        if any(start <= link.start() < end for start, end in code):
            return link[0]
        group = 1 if link[1] else 2
        rewritten = _rewritten(link[group], ROOT / page, here, others, repository)
        before, after = link.start(group) - link.start(), link.end(group) - link.start()
        return link[0][:before] + rewritten + link[0][after:]

    return LINK.sub(replace, text)


def _rewritten(target: str, page: Path, here: str, others: dict[str, str], repository: Repository) -> str:
    if re.match(r"[a-z]+:|#", target):
        return target
    name, _, anchor = target.partition("#")
    path = Path(os.path.normpath(page.parent / name))
    if path.is_dir() and (path / "README.md").is_file():
        path /= "README.md"
    there = site_path(path, others)
    address = repository.address(path) if there is None else os.path.relpath(there, Path(here).parent)
    return f"{address}#{anchor}" if anchor else address


def decisions() -> list[dict[str, object]]:
    """Return the entries of the navigation for the decision records."""
    entries = [
        (one.path.relative_to(ROOT / DOCS).as_posix(), f"{one.number} {one.title[0].upper()}{one.title[1:]}")
        for one in records()
    ]
    kept = [{title: path} for path, title in entries if "/archive/" not in path]
    return [
        {"All decisions": "adr/README.md"},
        *kept,
        {"Archive": [{t: p} for p, t in entries if "/archive/" in p]},
    ]
