"""Checks of the paths that a configuration names, before anything starts. Each raises ConfigError, naming the key."""

import os
import tempfile
from pathlib import Path

from core.errors import ConfigError


def readable_file(key: str, path: str) -> None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise _wrong(key, path, "be read", error) from None


def readable_folder(key: str, path: str) -> None:
    try:
        os.listdir(path)
    except OSError as error:
        raise _wrong(key, path, "be read", error) from None


def writable_folder(key: str, path: str) -> None:
    """Make the folder where it is missing, as the process that uses it would."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise _wrong(key, path, "be written", error) from None


def writable_file(key: str, path: str) -> None:
    """The file itself may be missing; what is there stays."""
    there = Path(path)
    try:
        if there.exists():
            with there.open("ab"):
                pass
        with tempfile.TemporaryFile(dir=there.parent) as file:
            file.write(b"x")
    except OSError as error:
        raise _wrong(key, path, "be written", error) from None


def _wrong(key: str, path: str, what: str, error: OSError) -> ConfigError:
    return ConfigError(f"{key}: {path} cannot {what}: {error.strerror or error}")
