"""`python -m cluster.deploy.kube.model_files fetch|wait`: weights come to a shared volume once, before any instance starts.

The chart's Job fetches what its configurations name from the hub. Each pod waits until all of it is there, and asks no hub
itself. A model is marked once it is whole, and is not fetched again: its weights do not change while others run with them."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import yaml

from core.config.cluster_config import ClusterConfig, load
from core.config.draft_config import draft_path
from core.config.residency_groups import part_of
from core.errors import ConfigError
from models.files.hub import folder_of, resolve

log = logging.getLogger(__name__)

POLL_S = 2.0
_SAY_EVERY_S = 60.0


def hub_ids(config: ClusterConfig) -> list[str]:
    """Return the hub ids of what instances load, of all models. Raises ConfigError."""
    paths = [path for row in config.rows for path in (row.model.path, draft_path(row.engine))]
    return [path for path in paths if path and folder_of(path) is None]


def fetch(ids: Sequence[str], volume: Path) -> None:
    """Download what is not marked as whole. Raises ConfigError."""
    for one in ids:
        mark = _mark(volume, one)
        if mark.exists():
            log.info("%s is here", one)
            continue
        log.info("%s is downloaded to %s", one, volume)
        folder = resolve(one)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(f"{folder}\n")
        log.info("%s is whole", one)


def wait(ids: Sequence[str], volume: Path, timeout_s: float) -> None:
    """Wait until all are whole. Raises ConfigError at the deadline."""
    started_at = said_at = time.monotonic()
    while missing := [one for one in ids if not _mark(volume, one).exists()]:
        now = time.monotonic()
        if now - started_at >= timeout_s:
            raise ConfigError(
                f"{missing[0]} was not fetched within {timeout_s:g} s: see the log of the Job that fetches models"
            )
        if now - said_at >= _SAY_EVERY_S:
            log.info("waits for the Job that fetches %s", ", ".join(missing))
            said_at = now
        time.sleep(POLL_S)


def _mark(volume: Path, hub_id: str) -> Path:
    return volume / "baton-fetched" / quote(hub_id, safe="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("fetch", "wait"))
    parser.add_argument("--config", action="append", type=Path, required=True, help="may be repeated")
    parser.add_argument("--model", default="", help="a row or a residency group of models; default: all")
    parser.add_argument("--volume", type=Path, required=True, help="the same folder for all, HF_HOME")
    parser.add_argument("--timeout-s", type=float, default=7200.0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        configs = [load(yaml.safe_load(file.read_text()), os.environ) for file in given.config]
        if given.model:
            configs = [part_of(config, given.model) for config in configs]
        ids = list(dict.fromkeys(one for config in configs for one in hub_ids(config)))
        if given.what == "fetch":
            fetch(ids, given.volume)
        else:
            wait(ids, given.volume, given.timeout_s)
    except ConfigError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
