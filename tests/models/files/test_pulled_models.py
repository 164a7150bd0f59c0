"""The cache of pulled models: who is found, who must stay, and who makes room."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.errors import ConfigError
from models.files.hub import folder_of
from models.files.pulled_models import InUse, NotPulled, PulledModel, PulledModels, models_folder
from models.files.pulled_names import PulledName, pulled_name

ROOT = Path(__file__).parents[3]
SIZE = 1000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PulledModels:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    return PulledModels()


def named(given: str) -> PulledName:
    name = pulled_name(given)
    assert name is not None
    return name


def put(cache: PulledModels, given: str, *, ago_s: float = 0.0, is_whole: bool = True) -> Path:
    name = named(given)
    folder = cache.folder(name)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(SIZE))
    with cache.changing(name):
        cache.write(name, PulledModel(name=given, revision="r", files={}, num_bytes=SIZE, is_whole=is_whole))
    used_at = time.time() - ago_s
    os.utime(cache.root / f"{name.key}.json", (used_at, used_at))
    return folder


@contextmanager
def serving(given: str) -> Iterator[None]:
    """A process that has found the model, and lives."""
    code = "import sys; from models.files.hub import folder_of; print(folder_of(sys.argv[1]), flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, given], cwd=ROOT, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline().strip() not in (b"", b"None")
        try:
            yield
        finally:
            process.stdin.close()


def names(cache: PulledModels) -> list[str]:
    return [each.model.name for each in cache.cached()]


def test_what_a_process_serves_is_neither_removed_nor_changed_until_it_ends(cache: PulledModels) -> None:
    folder = put(cache, "a/b")
    with serving("a/b"):
        assert [each.is_used for each in cache.cached()] == [True]
        with pytest.raises(InUse, match="a/b is being served"):
            cache.remove("a/b")
        with pytest.raises(InUse), cache.changing(named("a/b")):
            pass
        with pytest.raises(ConfigError, match="of which models that are in use take 1000"):
            cache.make_room(named("c/d"), 10, SIZE)
    assert folder.exists()
    assert cache.remove("a/b") == SIZE
    assert not folder.exists()
    with pytest.raises(NotPulled):
        cache.remove("a/b")


def test_what_is_being_pulled_is_not_removed(cache: PulledModels) -> None:
    put(cache, "a/b")
    with cache.pulling(named("a/b"), waits=False), pytest.raises(InUse, match="is being pulled"):
        cache.remove("a/b")


def test_the_least_recently_used_make_room_and_no_more_than_needed(cache: PulledModels) -> None:
    for given, ago_s in (("new/a", 10), ("old/a", 30), ("mid/a", 20), ("oldest/a", 40)):
        put(cache, given, ago_s=ago_s)
    assert folder_of("oldest/a") is not None
    cached = names(cache)
    assert cached[0] == "oldest/a", "finding it was a use"
    gone = cache.make_room(named("more/a"), 500, 3 * SIZE)
    assert [each.model.name for each in gone] == ["old/a", "mid/a"]
    assert names(cache) == ["oldest/a", "new/a"]
    assert cache.make_room(named("new/a"), SIZE, 2 * SIZE) == [], "a model does not make room for itself"


def test_nothing_is_removed_where_that_would_not_be_enough(cache: PulledModels) -> None:
    put(cache, "a/b")
    with pytest.raises(ConfigError, match="c/d needs 50 bytes, and the cache may have 40"):
        cache.make_room(named("c/d"), 50, 40)
    assert names(cache) == ["a/b"]


def test_what_is_not_whole_is_listed_and_not_found(cache: PulledModels) -> None:
    put(cache, "a/b", is_whole=False)
    assert cache.found("a/b") is None
    assert [each.model.is_whole for each in cache.cached()] == [False]
    cache.remove("a/b")


def test_a_removal_that_is_killed_leaves_nothing_that_passes_for_whole(
    cache: PulledModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "a/b")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("models.files.pulled_models.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        cache.remove("a/b")
    assert cache.found("a/b") is None


def test_damaged_records_are_passed_over(cache: PulledModels) -> None:
    put(cache, "a/b")
    (cache.root / f"{named('a/b').key}.json").write_text("{")
    (cache.root / "other.json").write_text("[]")
    assert cache.cached() == []
    assert cache.found("a/b") is None


def test_a_url_that_was_not_pulled_says_how_to(cache: PulledModels) -> None:
    with pytest.raises(ConfigError, match="baton models pull s3://bucket/folder"):
        folder_of("s3://bucket/folder")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_CACHE_DIR", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert models_folder() == Path.home() / ".cache/baton/models"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert models_folder() == Path("/x/baton/models")
    monkeypatch.setenv("HF_HOME", "/h")
    assert models_folder() == Path("/h/baton-models")
    monkeypatch.setenv("BATON_CACHE_DIR", "/b")
    assert models_folder() == Path("/b")
