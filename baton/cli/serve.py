"""`baton serve`: check everything that can be wrong, then start a cluster (or one process) and say how to use it."""

import os
import shutil
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from baton.cli.serve_options import overrides, signature
from baton.cli.yaml_file import read_yaml
from baton.own_tree import check_own_tree
from cluster.deploy.process_logs import configure_logging
from core.config.cluster_config import ClusterConfig, load
from core.config.device_transport import check_device_transport
from core.errors import ConfigError

if TYPE_CHECKING:
    from cluster.ingress.model_card import ModelCard


def serve(**given: Any) -> None:
    """Serve a model behind an OpenAI endpoint. Ctrl-C or SIGTERM finishes running requests, then stops everything."""
    from cluster.deploy.config_paths import check_paths  # noqa: PLC0415 (FastAPI: --help needs none)
    from cluster.ingress.model_card import read_model_card  # noqa: PLC0415 (each model family: --help needs none)

    check_own_tree()
    local: bool = given["local"]
    said = overrides(given) | dict(_key_value(text) for text in given["set_"] or [])
    settings = load(read_yaml(given["config"]), os.environ, said)
    _check_transport(settings, local=local)
    configure_logging(settings.serve.log_level, settings.serve.log_format)
    check_port(settings.serve.host, settings.serve.port)
    if local or given["ray_address"] == "local":
        check_paths(settings)
    cards = [read_model_card(row) for row in settings.rows]
    for row, card in zip(settings.rows, cards, strict=True):
        _announce_start(row, card, local=local)

    def on_ready() -> None:
        _announce_ready(settings, cards[0])

    if local:
        from cluster.local import serve_local  # noqa: PLC0415 (torch: seconds, after all checks)

        serve_local(settings, cards, on_ready, _announce_stop)
    else:
        from cluster.deploy.launch import serve_cluster  # noqa: PLC0415 (Ray: seconds, after all checks)

        serve_cluster(settings, given["ray_address"], on_ready, _announce_stop, _print)


# Typer reads the command line off the function's signature.
vars(serve)["__signature__"] = signature()


def _check_transport(settings: ClusterConfig, *, local: bool) -> None:
    """Raise ConfigError for a transport that cannot move KV here."""
    transport = settings.transfer.transport
    if transport == "loopback" and not local:
        raise ConfigError(
            "transfer.transport is loopback, which stays within one process: use it with --local, or auto"
        )
    if not local and settings.engine.device == "auto":
        # Instances ask Ray for a GPU where the configuration says cuda.
        check_device_transport(transport, "auto", "cpu")


def check_port(host: str, port: int) -> None:
    """Raise ConfigError when the port is not free."""
    try:
        with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}. Try another --port.") from None


def _key_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set takes KEY=VALUE, got {text!r}")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        said = " ".join(str(getattr(error, "problem", error)).split())
        raise ConfigError(f"--set {key}: {value!r} is not YAML: {said}") from None


def _print(text: str, **settings: Any) -> None:
    from rich.console import Console  # noqa: PLC0415 (--help needs none)

    Console(stderr=True, highlight=False).print(text, **settings)


def _announce_start(config: ClusterConfig, card: "ModelCard", *, local: bool) -> None:
    pools = (
        "one process"
        if local
        else f"{config.decode_instances} instances of any role"
        if config.any_role
        else f"{config.prefill_instances} prefill + {config.decode_instances} decode instances"
    )
    _print(
        f"[bold]Baton[/] serves [bold]{card.name}[/] ({card.architecture}, {card.max_context_tokens} tokens) from {pools}"
    )


def _announce_ready(config: ClusterConfig, card: "ModelCard") -> None:
    host = "127.0.0.1" if config.serve.host in ("0.0.0.0", "::") else config.serve.host
    base = f"{'https' if config.serve.tls_cert else 'http'}://{host}:{config.serve.port}"
    key = ' -H "Authorization: Bearer $YOUR_KEY"' if config.serve.api_keys else ""
    prompt = "# Parse the command line.\\ndef parse_args("
    body = f'{{"model": "{card.name}", "prompt": "{prompt}", "max_tokens": 64, "temperature": 0}}'
    _print(f"\n[green]Ready.[/] OpenAI endpoint: [bold]{base}/v1[/]   Try:\n", soft_wrap=True)
    _print(
        f"  curl -s {base}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'\n",
        soft_wrap=True,
        markup=False,
    )
    _print(
        f"  {as_called(sys.argv[0])} chat --base-url {base}     (in another terminal; Ctrl-C here stops the server)\n",
        soft_wrap=True,
        markup=False,
    )


def _announce_stop() -> None:
    _print("  stopping: running requests finish first")


def as_called(path: str) -> str:
    """Return what a shell finds the program that was called by `path` by: its name, or the path where the name finds another
    one or none."""
    name = Path(path).name
    if name != "baton":
        return "baton"
    found = shutil.which(name)
    return name if found is not None and Path(found).samefile(path) else path
