"""A YAML file that an operator names, read into a tree."""

from pathlib import Path
from typing import Any

import yaml

from core.errors import ConfigError


def read_yaml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text())
    except UnicodeDecodeError:
        raise ConfigError(f"the configuration file {path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the configuration file {path} is not YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"the configuration file {path} must hold keys and values")
    return content or {}
