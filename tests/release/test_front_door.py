"""What greets people who want to help: forms, hooks, editors' settings and updates name what exists, and say what CI says."""

import fnmatch
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
FORMS = [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "proposal.yml")]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
MAKEFILE = (ROOT / "Makefile").read_text()


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return listed.stdout.splitlines()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_has_what_github_asks_for(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert set(form) == {"name", "description", "labels", "body"}
    fields = [one for one in form["body"] if one["type"] != "markdown"]
    assert len({one["id"] for one in fields}) == len(fields)
    for one in fields:
        assert one["type"] in ("input", "textarea", "dropdown", "checkboxes")
        assert one["attributes"]["label"]
    assert any(one.get("validations", {}).get("required") for one in fields)


def test_every_owner_has_an_address_and_every_pattern_a_file() -> None:
    lines = [line for line in (GITHUB / "CODEOWNERS").read_text().splitlines() if not line.startswith("#")]
    assert lines
    for pattern, *owners in map(str.split, lines):
        assert owners
        assert all(re.fullmatch(r"@[\w-]+(/[\w-]+)?|[^@\s]+@[^@\s]+", owner) for owner in owners)
        assert fnmatch.filter(tracked(), pattern.removeprefix("/")), pattern


def test_hooks_are_ours_so_that_they_have_the_releases_of_the_locks() -> None:
    assert [one["repo"] for one in HOOKS] == ["local"]
    for hook in HOOKS[0]["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/")


def test_hooks_run_every_check_of_make_lint_and_make_docs() -> None:
    """`pip check` alone is left out: no change of a file makes it fail."""
    rules = dict(re.findall(r"^(lint|docs):[^\n]*\n((?:\t[^\n]*\n)+)", MAKEFILE, re.MULTILINE))
    commands = "".join(rules.values())
    entries = [hook["entry"].removesuffix(" --force-exclude") for hook in HOOKS[0]["hooks"]]
    assert len(commands.splitlines()) == len(entries) + 1
    for entry in entries:
        assert entry.removeprefix(".venv/bin/").removeprefix("python ") in commands, entry


def test_a_locks_hook_runs_for_what_the_locks_are_made_from() -> None:
    [locks] = [hook for hook in HOOKS[0]["hooks"] if hook["id"] == "locks"]
    assert all(re.search(locks["files"], name) for name in ("pyproject.toml", "locks/dev.txt", ".ci/lock.py"))


def test_updates_are_looked_for_where_there_is_something_to_update() -> None:
    updates = yaml.safe_load((GITHUB / "dependabot.yml").read_text())["updates"]
    assert {one["package-ecosystem"] for one in updates} == {"pip", "github-actions", "docker", "npm"}
    for one in updates:
        for folder in one.get("directories", [one.get("directory")]):
            assert list(ROOT.glob(folder.lstrip("/") or "*")), folder


def test_the_dev_container_has_the_images_python_and_runs_what_exists() -> None:
    container: dict[str, Any] = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    [python] = re.findall(r"^ARG PYTHON=(python:[\d.]+)-", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert container["image"].startswith(python)
    program, setup, hooks = container["postCreateCommand"].split(" && ")
    assert os.access(ROOT / program, os.X_OK)
    assert setup == "make setup"
    assert hooks == ".venv/bin/pre-commit install"
    assert re.search(r"^pre-commit==", (ROOT / "locks" / "dev.txt").read_text(), re.MULTILINE)
    assert program in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("rule", ["final newline", "trailing space", "line ends", "tabs"])
def test_files_are_as_editorconfig_says(rule: str) -> None:
    assert [name for name in tracked() if breaks(rule, name)] == []


def breaks(rule: str, name: str) -> bool:
    try:
        text = (ROOT / name).read_bytes().decode()
    except (UnicodeDecodeError, FileNotFoundError):
        return False
    if rule == "final newline":
        return bool(text) and not text.endswith("\n") and not name.startswith("models/embedded/")
    if rule == "trailing space":
        return re.search(r"[ \t]$", text, re.MULTILINE) is not None
    if rule == "line ends":
        return "\r" in text
    return name != "Makefile" and re.search(r"^\t", text, re.MULTILINE) is not None
