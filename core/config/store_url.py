"""Where the store is: `serve.store`, `serve.store_file`, or what an earlier release's configuration implies."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from core.errors import ConfigError

if TYPE_CHECKING:
    from core.config.serve_config import ServeConfig

SQLITE, POSTGRES = "sqlite", "postgresql"


def check_store(serve: "ServeConfig") -> None:
    """Raise ConfigError for a URL that names no store, or that shows a password."""
    if serve.store and serve.store_file:
        raise ConfigError("serve.store and serve.store_file name one store each: give one of them")
    if serve.store_file and not Path(serve.store_file).is_absolute():
        raise ConfigError(
            f"serve.store_file is {serve.store_file!r}: give a whole path, since processes have working folders of their own"
        )
    if serve.store:
        _check_url(serve.store)


def store_reader(serve: "ServeConfig") -> Callable[[], str] | None:
    """Return what reads the store's URL; None where no store is named. An earlier release's folder of batches becomes one."""
    if serve.store_file:
        return partial(read_url, serve.store_file)
    url = serve.store
    if not url and serve.batch_dir:
        url = f"sqlite:///{Path(serve.batch_dir).expanduser() / 'store.db'}"
    return (lambda: url) if url else None


def sqlite_path(url: str) -> Path | None:
    """Return the file of a SQLite URL; None for PostgreSQL."""
    parts = urlsplit(url)
    return Path(parts.path.removeprefix("/")).expanduser() if parts.scheme == SQLITE else None


def read_url(file: str) -> str:
    """Return the URL that a file has. Raises ConfigError, which does not repeat it."""
    try:
        url = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.store_file: cannot read {file}: {error}") from None
    if not _names_store(url):
        raise ConfigError(
            f"serve.store_file: {file} has no URL that begins with sqlite://// or postgresql://"
        )
    return url


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        shows_password = bool(parts.password) or "password=" in parts.query
    except ValueError:
        raise ConfigError(
            "serve.store is no URL: give sqlite:////folder/store.db or postgresql://host/database"
        ) from None
    if shows_password:
        raise ConfigError(
            "serve.store has a password in it: write the URL into a file and name that in serve.store_file, or give the "
            "password in the environment's PGPASSWORD or PGPASSFILE"
        )
    if not _names_store(url):
        raise ConfigError(
            f"serve.store is {url!r}: give sqlite:////folder/store.db, a whole path after three slashes, or "
            "postgresql://host/database"
        )


def _names_store(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme == SQLITE:
        return not parts.netloc and Path(parts.path.removeprefix("/")).expanduser().is_absolute()
    return parts.scheme == POSTGRES
