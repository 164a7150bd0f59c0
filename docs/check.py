"""Check every Markdown page: relative links and anchors resolve, and what a page names in backticks exists.

A path must exist, a name in CamelCase must be defined, and each word of a dotted name must occur in the code.

`python docs/check.py [ROOT]` prints one line for each mistake and exits with 1 when there is any.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CODE_SUFFIXES = {".py", ".yaml", ".tpl", ".toml"}
FILE_SUFFIX = re.compile(r"\.(c|cpp|h|html|json|md|png|py|sh|svg|tpl|toml|txt|yaml)$")
OTHERS = {"False", "Init", "NewClusterWithIncrementalUpgrade", "None", "Pending", "True", "tune.bufsize"}
"""Names that pages mention and that our code does not define."""
SKIPPED_FOLDERS = {"build", "dist", "node_modules"}
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*? src=\"([^\"]+)\"")
CODE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
PATH = re.compile(r"[\w.{},*-]+(/[\w.{},*-]+)+/?|[\w-]+/")
NAME = re.compile(r"[A-Z]\w*[a-z]\w*|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
WORD = re.compile(r"\w+")
DEFINED = re.compile(
    r"\b(?:class|def)\s+(\w+)|^\s*(\w+)\s*(?::[^=\n]+)?=|\"(\w+)\"|\bimport\s+(.+)", re.MULTILINE
)


def main(root: Path) -> int:
    files = list(walk(root))
    words = words_of_code(files)
    mistakes = [
        f"{page.relative_to(root)}: {mistake}"
        for page in files
        if page.suffix == ".md"
        for mistake in check_page(page, root, words)
    ]
    print("\n".join(mistakes) or "docs: every link, file and class named in a page exists")
    return 1 if mistakes else 0


def walk(root: Path) -> Iterator[Path]:
    """Yield the files of the project, without hidden folders and what builds leave."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names))


def words_of_code(files: list[Path]) -> set[str]:
    """Return all words but those in CamelCase that Python files mention without defining, importing or quoting them."""
    words = {file.name for file in files} | OTHERS
    for file in files:
        if file.suffix in CODE_SUFFIXES:
            text = file.read_text()
            found = WORD.findall(text)
            if file.suffix == ".py":
                found = [word for word in found if not word[0].isupper()]
                found += WORD.findall(" ".join(map(" ".join, DEFINED.findall(text))))
            words.update(found)
    return words


def check_page(page: Path, root: Path, words: set[str]) -> Iterator[str]:
    text = FENCE.sub("", page.read_text())
    for link in LINK.findall(CODE.sub("", text)):
        yield from check_link(page, link[0] or link[1])
    for code in CODE.findall(text):
        known = code in words or words.issuperset(code.split("."))
        if (PATH.fullmatch(code) and not exists(code, page, root)) or (NAME.fullmatch(code) and not known):
            yield f"`{code}` does not exist"


def check_link(page: Path, link: str) -> Iterator[str]:
    if re.match(r"[a-z]+:", link):
        return
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        yield f"the link {link} leads nowhere"
    elif anchor and anchor not in anchors(target):
        yield f"the link {link} names no heading of {target.name}"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    slugs: dict[str, int] = {}
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{slug}-{slugs[slug]}" if slug in slugs else slug)
        slugs[slug] = slugs.get(slug, 0) + 1
    return found


def exists(name: str, page: Path, root: Path) -> bool:
    """Say whether a path exists. Without a file's suffix a name is a path only if it ends in a slash or its folder exists. What
    is in `build` is there once somebody has built it."""
    folder = name.rstrip("/").rsplit("/", 1)[0]
    if name.startswith("build/"):
        return True
    if not (FILE_SUFFIX.search(name) or name.endswith("/") or ("-" not in name and (root / folder).is_dir())):
        return True
    return all(
        any(any(base.glob(one.rstrip("/"))) for base in (root, page.parent)) for one in expand_braces(name)
    )


def expand_braces(name: str) -> list[str]:
    """Expand `a/{b,c}.py` as a shell does."""
    braces = re.search(r"\{([^{}]*)\}", name)
    if braces is None:
        return [name]
    return [
        one
        for part in braces[1].split(",")
        for one in expand_braces(name[: braces.start()] + part + name[braces.end() :])
    ]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parent.parent)))
