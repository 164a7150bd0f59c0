"""A child that logs and complains in place of serving as a rank."""

import logging
import sys

from engine.ranks.rank_logs import log_to_instance

log = logging.getLogger("models.formats.checkpoint")


def main() -> None:
    log_to_instance()
    log.debug("not to be said")
    log.info("loaded")
    log.warning("slow disk")
    sys.stderr.write("RuntimeError: no luck\n")


if __name__ == "__main__":
    main()
