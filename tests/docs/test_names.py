"""The house rules that a linter does not know: one name for one thing, docstrings that are sentences."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *(
        "baton",
        "cluster",
        "core",
        "decode",
        "device",
        "engine",
        "kernels",
        "kvtransfer",
        "models",
        "net",
        "parallel",
        "prefill",
        "sim",
    ),
)
SHARED_NAMES = re.compile(r"baton/cli/|kernels/|models/|cluster/ingress/parsers/")
"""A command's file has the command's name; `kernels/`, its implementations and the layers of `models/` mirror each other."""

FRAGMENT = re.compile(r"(Of|Those|That|Whoever|Who has|So many|And|But|Or|As well)\b")
"""Words that refer back to what a docstring has not said yet."""


@functools.cache
def sources(*folders: str) -> list[tuple[str, ast.Module]]:
    return [
        (str(path.relative_to(ROOT)), ast.parse(path.read_text()))
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value.strip()


def test_no_public_class_name_stands_for_two_things() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in sources(*PACKAGES):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_a_file_is_known_by_its_name_alone() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, _ in sources(*PACKAGES):
        if not SHARED_NAMES.match(path) and not path.endswith("__init__.py"):
            found[path.rsplit("/", 1)[-1]].append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_docstrings_begin_with_what_they_are_about() -> None:
    begun = [
        f"{path}:{line}: {text[:60]}"
        for path, tree in sources(*PACKAGES) + sources("benchmarks", "charts", "docs", "examples", "tests")
        for line, text in docstrings(tree)
        if FRAGMENT.match(text)
    ]
    assert begun == []


def test_a_file_has_at_most_400_lines() -> None:
    files = [path for folder in (*PACKAGES, "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
    long = {str(path.relative_to(ROOT)) for path in files if path.read_text().count("\n") > 400}
    assert long == set()


def test_no_comment_is_a_banner() -> None:
    banner = re.compile(r"^\s*#\s*[-=#*]{4,}", re.MULTILINE)
    files = [path for folder in (*PACKAGES, "tests") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in files if banner.search(path.read_text())] == []
