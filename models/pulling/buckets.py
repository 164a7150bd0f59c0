"""What a bucket has under a prefix: S3, Google Cloud Storage and Azure, by obstore."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any, Final

from core.errors import ConfigError, first_line
from models.files.pulled_names import PulledName
from models.pulling.remote_files import Interrupted, Read, RemoteFile

_CHUNK: Final = 1 << 20


def files_of_bucket(name: PulledName, sha256: str) -> list[RemoteFile]:
    """Return what is under a prefix, or the one GGUF file. obstore finds credentials as the clouds' own programs do, and tries
    again by itself. Raises ConfigError."""
    if find_spec("obstore") is None:
        raise ConfigError(
            f"{name.text} is in a bucket, which needs obstore: pip install 'baton-serve[buckets]'"
        )
    obstore, failure = _library()
    is_file = name.path.endswith(".gguf")
    root, _, last = name.path.rpartition("/") if is_file else (name.path, "", "")
    try:
        store = obstore.store.from_url(root)
        found = [obstore.head(store, last)] if is_file else obstore.list(store).collect()
    except (failure, OSError, ValueError) as error:
        raise ConfigError(f"cannot list {name.text}: {first_line(error)}") from None
    return [
        RemoteFile(
            path=PurePosixPath(each["path"]).name if is_file else each["path"],
            num_bytes=each["size"],
            version=f"{each['e_tag']} {each['last_modified']} {each['size']} {sha256}",
            sha256=sha256,
            read=_reader(store, each["path"], each["e_tag"], each["size"]),
        )
        for each in found
    ]


def _reader(store: Any, path: str, e_tag: str | None, num_bytes: int) -> Read:
    obstore, failure = _library()

    def read(offset: int) -> Iterator[bytes]:
        options: dict[str, Any] = {"if_match": e_tag} if e_tag else {}
        if offset:
            options["range"] = (offset, num_bytes)
        try:
            for chunk in obstore.get(store, path, options=options).stream(min_chunk_size=_CHUNK):
                yield bytes(chunk)
        except failure as error:
            raise Interrupted(first_line(error)) from None
        except OSError as error:
            raise ConfigError(f"{path}: {first_line(error)}") from None

    return read


def _library() -> tuple[Any, type[Exception]]:
    """Return obstore, which is an extra, and its errors."""
    import_module("obstore.store")
    return import_module("obstore"), import_module("obstore.exceptions").BaseError
