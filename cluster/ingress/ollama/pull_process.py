"""Pulls a model apart from the ingress, whose thread sends tokens: `python -m cluster.ingress.ollama.pull_process NAME`.

It writes the lines of Ollama's /api/pull, of which the last is a success or an error with its status. It ends when nobody reads
them any more. What it has fetched stays, and the next pull goes on with it."""

import json
import sys
from typing import Any

from cluster.ingress.ollama.public_transport import PublicTransport
from core.errors import ConfigError
from models.files.pulled_models import CacheFull, InUse, PulledModels
from models.files.pulled_names import pulled_name
from models.pulling.pull import Pull


def main() -> None:
    (given,) = sys.argv[1:]
    name = pulled_name(given)
    transport = PublicTransport() if name is not None and name.place == "url" else None
    try:
        Pull(PulledModels(), lambda progress: _say(progress.as_ollamas), transport=transport).run(given)
    except ConfigError as error:
        status = 409 if isinstance(error, InUse) else 507 if isinstance(error, CacheFull) else 400
        _say({"error": str(error), "status": status})


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
