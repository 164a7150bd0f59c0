"""Models are pulled from what looks like each place, whole or not at all."""

import base64
import errno
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import ConfigError
from models.files.hub import folder_of, resolve
from models.files.pulled_models import PulledModels
from models.files.pulled_names import pulled_name
from models.pulling import download
from models.pulling.pull import Pull, PullProgress, read_bytes
from tests.models.pulling.fake_places import CONFIG, TOKEN, WEIGHTS, FakePlaces
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
CLI = [sys.executable, "-m", "baton.cli", "models"]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakePlaces]:
    with FakePlaces().running() as places:
        monkeypatch.setenv("HF_ENDPOINT", places.url)
        monkeypatch.setenv("MODELSCOPE_DOMAIN", places.url)
        monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        for name in ("HF_TOKEN", "MODELSCOPE_API_TOKEN", "BATON_CACHE_BYTES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(download, "_FIRST_WAIT_S", 0.001)
        yield places


def pull(name: str, **settings: object) -> tuple[Path, list[PullProgress]]:
    told: list[PullProgress] = []
    return Pull(PulledModels(), told.append, **settings).run(name), told  # type: ignore[arg-type]


def half_there(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("*/.parts/*"))


@pytest.mark.parametrize(
    "name",
    ["org/name", "org/name@main", "modelscope://org/name", "hf.co/org/name:latest", "modelscope.cn/org/name"],
)
def test_a_hubs_model_is_fetched_and_found_without_a_network(places: FakePlaces, name: str) -> None:
    folder, told = pull(name)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "config.json": CONFIG,
        "model.safetensors": WEIGHTS,
    }
    assert [each.status for each in told if not each.path] == [
        "pulling manifest",
        "verifying sha256 digest",
        "writing manifest",
        "success",
    ]
    last = [each.as_ollamas for each in told if each.path == "model.safetensors"][-1]
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    whole = {"digest": f"sha256:{digest}", "total": len(WEIGHTS), "completed": len(WEIGHTS)}
    assert last == {"status": f"pulling {digest[:12]}", **whole}
    asked = len(places.asked)
    assert resolve(name) == folder
    assert len(places.asked) == asked


def test_what_is_there_is_not_fetched_again_until_it_changes(places: FakePlaces) -> None:
    pull("org/name")
    pull("org/name")
    assert places.bytes_asked("model.safetensors") == [0]
    places.files["config.json"], places.commit = b"{}", "b" * 40
    folder, _ = pull("org/name")
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (places.bytes_asked("model.safetensors"), places.bytes_asked("config.json")) == ([0], [0, 0])


def test_a_connection_that_breaks_goes_on_where_it_did(places: FakePlaces) -> None:
    places.breaks_after["model.safetensors"] = [1_000_000, 2_000_000]
    folder, _ = pull("org/name")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert places.bytes_asked("model.safetensors") == [0, 1_000_000, 2_000_000]


def test_a_server_without_ranges_is_read_from_the_beginning(places: FakePlaces) -> None:
    places.ranges, places.breaks_after["model.safetensors"] = False, [1_000_000]
    folder, _ = pull("org/name")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_a_server_that_brings_nothing_is_given_up_and_what_came_stays(places: FakePlaces) -> None:
    places.breaks_after["model.safetensors"] = [1_000_000] * 7
    with pytest.raises(ConfigError, match="ended after 1000000 of 3145728 bytes .* What has come stays"):
        pull("org/name")
    assert places.bytes_asked("model.safetensors") == [0, *[1_000_000] * 5]
    assert folder_of("org/name") is None, "it is not whole"


def test_a_pull_that_is_killed_goes_on_with_what_it_has(places: FakePlaces, tmp_path: Path) -> None:
    places.stops_after["model.safetensors"] = 2_000_000
    killed = subprocess.Popen([*CLI, "pull", "org/name"], cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while half_there(tmp_path / "cache") < 1_990_000 and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    there = half_there(tmp_path / "cache")
    assert there >= 1_990_000
    listed = subprocess.run([*CLI, "cached"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "half: pull it again" in listed
    places.stops_after.clear()
    folder, _ = pull("org/name")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert places.bytes_asked("model.safetensors") == [0, there]
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
def test_a_file_with_another_digest_is_refused(places: FakePlaces, path: str) -> None:
    places.stated[path] = "0" * (64 if path == "model.safetensors" else 40)
    with pytest.raises(ConfigError, match=f"{path} has the digest .* and should have 0000"):
        pull("org/name")
    assert not list(PulledModels().root.glob(f"*/{path}"))
    places.stated.clear()
    pull("org/name")


def test_a_token_goes_to_the_hub_and_to_no_other_host(
    places: FakePlaces, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    places.token = TOKEN
    with pytest.raises(ConfigError, match="cannot get org/name from the hub"):
        pull("org/name")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
    pull("org/name")
    pull("modelscope://org/name")
    others = [each for each in places.asked if each.host == "localhost"]
    assert len(others) == 4
    assert {(each.authorization, each.cookie) for each in others} == {("", "")}
    assert TOKEN not in caplog.text


def test_a_file_of_a_url_is_checked_by_what_one_says_of_it(places: FakePlaces) -> None:
    places.files["m.gguf"] = b"GGUF" * 1000
    url, right = f"{places.url}/kept/m.gguf", hashlib.sha256(b"GGUF" * 1000).hexdigest()
    with pytest.raises(ConfigError, match="should have 1111"):
        pull(url, sha256="1" * 64)
    places.headers["Repr-Digest"] = "sha-256=:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=:"
    with pytest.raises(ConfigError, match="should have 0000"):
        pull(url)
    places.headers["Repr-Digest"] = f"sha-256=:{base64.b64encode(bytes.fromhex(right)).decode()}:"
    folder, _ = pull(url)
    assert PulledModels().found(url) == folder / "m.gguf"
    with pytest.raises(ConfigError, match="--sha256 is of one file"):
        pull("org/name", sha256=right)


def test_two_pulls_at_once_do_the_work_once(places: FakePlaces) -> None:
    places.stops_after["model.safetensors"] = 2_000_000
    both = [threading.Thread(target=pull, args=("org/name",)) for _ in range(2)]
    for each in both:
        each.start()
    assert places.stopped.wait(PATIENCE_S)
    places.stops_after.clear()
    places.gate.set()
    for each in both:
        each.join()
    first, *rest = places.bytes_asked("model.safetensors")
    assert (first, len(rest)) == (0, 1)
    assert rest[0] >= 1_990_000


def test_a_full_disk_is_said_and_nothing_half_stays(
    places: FakePlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "os", _Full())
    with pytest.raises(ConfigError, match="is full, and nothing of org/name is left"):
        pull("org/name")
    assert not [path for path in PulledModels().root.rglob("*") if path.stat().st_size]
    assert PulledModels().cached() == []


class _Full:
    """`os`, on a disk that has no room."""

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_without_room_is_said_before_anything_is_fetched(
    places: FakePlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.pulling.pull.shutil.disk_usage", lambda path: _Room)
    with pytest.raises(
        ConfigError, match=r"org/name needs 3145751 more bytes, and the disk of .* has 7 free"
    ):
        pull("org/name")
    assert places.bytes_asked("model.safetensors") == []


class _Room:
    free = 7


@pytest.mark.parametrize(
    "path",
    ["../evil.json", "/etc/evil.json", "a/../../evil.json", ".git/evil.json", "a\\b.json", "a//b.json"],
)
def test_a_file_that_would_be_written_elsewhere_is_refused(
    places: FakePlaces, path: str, tmp_path: Path
) -> None:
    places.files[path] = b"{}"
    with pytest.raises(ConfigError, match="which is not fetched"):
        pull("org/name")
    assert not list(tmp_path.rglob("*evil*"))


def test_links_in_the_cache_are_not_followed(places: FakePlaces, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    name = pulled_name("org/name")
    assert name is not None
    folder = PulledModels().folder(name)
    folder.parent.mkdir()
    folder.symlink_to(outside)
    with pytest.raises(ConfigError, match="is a link"):
        pull("org/name")
    folder.unlink()
    folder.mkdir()
    (folder / "config.json").symlink_to(outside / "config.json")
    (folder / ".parts").symlink_to(outside)
    pull("org/name")
    assert list(outside.iterdir()) == []


def test_repositories_that_are_no_models_are_refused(places: FakePlaces) -> None:
    places.files = {"a-q4.gguf": b"x"}
    with pytest.raises(ConfigError, match=r"has GGUF files: pull one of them by its URL \(a-q4.gguf\)"):
        pull("org/name")
    places.files = {"README.md": b"x"}
    with pytest.raises(ConfigError, match="org/name has no safetensors files"):
        pull("org/name")
    with pytest.raises(ConfigError, match="cannot get org/none from the hub"):
        pull("org/none")
    with pytest.raises(ConfigError, match="none.gguf cannot be read: status 404"):
        pull(f"{places.url}/kept/none.gguf")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "name",
        "a/b/c",
        "../b",
        "a/..",
        "a/b@../c",
        "https://u:p@h/a.gguf",
        "https://h/a.gguf?token=1",
        "https://h/../a.gguf",
        "https://h/a.bin",
        "file:///a.gguf",
        "s3://",
    ],
)
def test_names_that_nothing_is_pulled_by(name: str) -> None:
    assert pulled_name(name) is None
    with pytest.raises(ConfigError, match="cannot be pulled"):
        pull(name)


def test_different_names_have_different_places() -> None:
    names = [
        "a/b",
        "a/b@c",
        "modelscope://a/b",
        "s3://a/b",
        "gs://a/b",
        "https://a/b.gguf",
        "http://a/b.gguf",
    ]
    keys = [name.key for each in names if (name := pulled_name(each))]
    assert len(set(keys)) == len(names)
    assert all("/" not in key and not key.startswith(".") for key in keys)


@pytest.mark.parametrize(
    ("given", "size"), [("5", 5), ("500G", 5 * 10**11), ("1.5tb", 15 * 10**11), ("10 kB", 10_000)]
)
def test_sizes_are_read(given: str, size: int) -> None:
    assert read_bytes(given, "x") == size


@pytest.mark.parametrize("given", ["", "b", "-1", "0", "nan", "inf", "1x", "g"])
def test_what_is_no_size_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="give bytes"):
        read_bytes(given, "--max-bytes")


def test_a_bucket_needs_its_library(monkeypatch: pytest.MonkeyPatch, places: FakePlaces) -> None:
    monkeypatch.setattr("models.pulling.buckets.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[buckets\]'"):
        pull("s3://bucket/folder")


def test_a_buckets_folder_and_its_single_file_are_pulled(
    places: FakePlaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", places.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    places.breaks_after["model.safetensors"] = [1_000_000]
    folder, _ = pull("s3://bucket/folder")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "config.json": CONFIG,
        "model.safetensors": WEIGHTS,
    }
    assert resolve("s3://bucket/folder/") == folder
    places.files["m.gguf"] = b"GGUF" * 1000
    url = "s3://bucket/folder/m.gguf"
    with pytest.raises(ConfigError, match="should have 1111"):
        pull(url, sha256="1" * 64)
    folder, _ = pull(url, sha256=hashlib.sha256(places.files["m.gguf"]).hexdigest())
    assert PulledModels().found(url) == folder / "m.gguf"
    with pytest.raises(ConfigError, match="cannot list s3://none/x"):
        pull("s3://none/x")
