"""What mkdocs calls while it builds the site (mkdocs.yml): pages outside docs/ are added, links are made to fit."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from docs.site_markdown import for_python_markdown
from docs.site_pages import (
    DECISIONS,
    DOCS,
    ROOT,
    Repository,
    decisions,
    outside,
    rewrite_links,
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = _with_decisions(config.nav)
    # The anchors that GitHub gives headings.
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def _with_decisions(entry: Any) -> Any:
    """Return the navigation with the list of decision records in the place of `adr/`."""
    if isinstance(entry, dict):
        return {
            name: decisions() if one == DECISIONS else _with_decisions(one) for name, one in entry.items()
        }
    return [_with_decisions(one) for one in entry] if isinstance(entry, list) else entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, there in outside().items():
        files.append(File.generated(config, there, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = _path_of(page)
    page.edit_url = f"{config.extra['repository']}/edit/main/{path}"
    repository = Repository(config.extra["repository"], config.extra["revision"])
    return for_python_markdown(rewrite_links(markdown, path, repository))


def _path_of(page: Page) -> str:
    there = page.file.src_uri
    return {site: path for path, site in outside().items()}.get(there, f"{DOCS}/{there}")
