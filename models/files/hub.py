"""Finds a model's files: the embedded one or its draft model, a folder, a GGUF file, what was pulled into the cache, or a
Hugging Face hub id."""

from pathlib import Path

from core.errors import ConfigError, first_line
from models.files.pulled_models import PulledModels

_EMBEDDED = Path(__file__).resolve().parents[1] / "embedded"
_OURS = {"embedded": _EMBEDDED, "embedded-draft": _EMBEDDED / "draft"}
IGNORED = ["consolidated*", "original/*"]
"""The same weights in other formats, which some repositories hold too."""
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model*", "*.txt"]


def resolve(path_or_id: str) -> Path:
    """Return the model's folder. A hub id is downloaded (or found in the local cache). Raises ConfigError."""
    return _found(path_or_id, PATTERNS)


def describe(path_or_id: str) -> Path:
    """Return a folder with the model's configuration; of a hub id that is all that is downloaded. Raises ConfigError."""
    return _found(path_or_id, ["*.json"])


def _found(path_or_id: str, patterns: list[str]) -> Path:
    if (folder := folder_of(path_or_id)) is not None:
        return folder
    repo_id, _, revision = path_or_id.partition("@")
    # Half a second of processor time, which a model in a folder does not need.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(
            snapshot_download(
                repo_id, revision=revision or None, allow_patterns=patterns, ignore_patterns=IGNORED
            )
        )
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, ValueError) as error:
        raise ConfigError(
            f"cannot get the model {path_or_id!r} from the hub, and no such folder exists: {first_line(error)}"
        ) from None


def folder_of(path_or_id: str) -> Path | None:
    """Return the folder if it is on this machine, without asking the hub; None for a hub id. What was pulled stays in the cache
    until this process ends. Raises ConfigError for what is neither."""
    if path_or_id in _OURS:
        return _OURS[path_or_id]
    if not path_or_id:
        raise ConfigError("the model is empty: give a folder, a hub id (owner/name) or `embedded`")
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        # It needs numpy, which a command line that only says its help does not.
        from models.files.gguf_folder import folder_of_gguf  # noqa: PLC0415

        return folder_of_gguf(path)
    if (pulled := PulledModels().found(path_or_id)) is not None:
        return folder_of(str(pulled))
    if "://" in path_or_id:
        raise ConfigError(f"{path_or_id} is not in this host's cache: baton models pull {path_or_id}")
    if path.is_absolute() or path_or_id.startswith((".", "~")) or path_or_id.count("/") != 1:
        raise ConfigError(
            f"there is no model folder or GGUF file {path_or_id} (a hub id looks like owner/name; `embedded` ships with Baton)"
        )
    return None
