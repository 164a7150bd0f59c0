"""Checks what a command shall write before the work that it takes: after minutes it would be too late."""

import os
from pathlib import Path

from core.errors import ConfigError

_PICTURES = (".png", ".svg", ".pdf")


def check_writable(*paths: Path | None) -> None:
    """Raise ConfigError where a file cannot be written. None: none is wanted."""
    for path in paths:
        if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise ConfigError(f"cannot write {path}: is its folder there, and yours to write in?")


def check_picture(path: Path | None) -> None:
    """Raise ConfigError where a picture cannot be written, or is of no known kind."""
    if path is not None and path.suffix.lower() not in _PICTURES:
        raise ConfigError(f"{path}: a picture's name ends in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}")
    check_writable(path)


def make_folder(path: Path | None) -> None:
    """Make a folder, unless it is there. Raises ConfigError. None: none is wanted."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror}") from None
