"""Where the store is, and how a configuration may say so."""

from pathlib import Path

import pytest

from core.config.cluster_config import load
from core.config.store_url import sqlite_path, store_reader
from core.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("store.db", "is 'store.db': give sqlite"),
        ("mysql://host/x", "is 'mysql://host/x': give sqlite"),
        ("sqlite:///store.db", "a whole path after three slashes"),
        ("sqlite://host/store.db", "a whole path after three slashes"),
        ("postgresql://[host/x", "is no URL"),
        ("postgresql://me:geheim@host/x", "has a password in it"),
        ("postgresql://host/x?user=me&password=geheim", "has a password in it"),
    ],
)
def test_what_names_no_store_or_shows_a_password_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load({"serve": {"store": url}}, {})
    assert "geheim" not in str(refused.value)


def test_one_place_names_it() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        load({"serve": {"store": "postgresql://host/x", "store_file": "/etc/url"}}, {})
    with pytest.raises(ConfigError, match="give a whole path"):
        load({"serve": {"store_file": "url"}}, {})


def test_a_folder_of_an_earlier_release_becomes_a_store() -> None:
    read = store_reader(load({"serve": {"batch_dir": "/batches"}}, {}).serve)
    assert read is not None
    assert sqlite_path(read()) == Path("/batches/store.db")
    assert store_reader(load({}, {}).serve) is None


def test_a_file_is_read_again_for_each_connection(tmp_path: Path) -> None:
    file = tmp_path / "url"
    read = store_reader(load({"serve": {"store_file": str(file)}}, {}).serve)
    assert read is not None
    for password in ("old", "new"):
        file.write_text(f"postgresql://me:{password}@host/x\n")
        assert read() == f"postgresql://me:{password}@host/x"
    file.write_text("geheim")
    with pytest.raises(ConfigError, match="has no URL that begins") as refused:
        read()
    assert "geheim" not in str(refused.value)
