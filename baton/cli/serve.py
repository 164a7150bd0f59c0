"""`baton serve`: check everything that can be wrong, then start a cluster (or one process) and say how to use it."""

import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from baton.cli.yaml_file import read_yaml
from baton.own_tree import check_own_tree
from cluster.deploy.process_logs import configure_logging
from cluster.ingress.model_card import ModelCard, read_model_card
from core.config import ClusterConfig, load
from core.errors import ConfigError

console = Console(stderr=True, highlight=False)


def serve(
    model: Annotated[
        str, typer.Option(help="Hugging Face folder or hub id; `embedded` ships with Baton.")
    ] = "embedded",
    name: Annotated[
        str, typer.Option(help="The model name that clients use (default: the model's own).")
    ] = "",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill instances.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode instances.")] = 1,
    any_role: Annotated[
        bool,
        typer.Option(
            "--any-role", help="The decode instances compute prompts, too; none is for prefill alone."
        ),
    ] = False,
    prefill_tp: Annotated[
        int, typer.Option("--prefill-tp", min=1, help="Tensor-parallel ranks of a prefill instance.")
    ] = 1,
    prefill_pp: Annotated[
        int, typer.Option("--prefill-pp", min=1, help="Pipeline stages of a prefill instance.")
    ] = 1,
    decode_tp: Annotated[
        int, typer.Option("--decode-tp", min=1, help="Tensor-parallel ranks of a decode instance.")
    ] = 1,
    decode_pp: Annotated[
        int, typer.Option("--decode-pp", min=1, help="Pipeline stages of a decode instance.")
    ] = 1,
    prefill_dp: Annotated[
        int,
        typer.Option("--prefill-dp", min=1, help="Groups of a prefill instance's ranks with own sequences."),
    ] = 1,
    decode_dp: Annotated[
        int,
        typer.Option("--decode-dp", min=1, help="Groups of a decode instance's ranks with own sequences."),
    ] = 1,
    prefill_ep: Annotated[
        int, typer.Option("--prefill-ep", min=1, help="Expert-parallel ranks of a prefill instance.")
    ] = 1,
    decode_ep: Annotated[
        int, typer.Option("--decode-ep", min=1, help="Expert-parallel ranks of a decode instance.")
    ] = 1,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    local: Annotated[
        bool, typer.Option("--local", help="One process, no Ray (default there: no separate prefill).")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    transport: Annotated[
        str, typer.Option(help="KV transport: auto, shm, tcp (loopback within one process).")
    ] = "auto",
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Bitwise the same logits whatever the batch and the chunks; slower."
        ),
    ] = False,
    kv_replicas: Annotated[
        int,
        typer.Option(min=0, max=1, help="1: decode KV is copied to a buddy (needs engine.host_cache_bytes)."),
    ] = 0,
    max_context: Annotated[
        int, typer.Option(min=0, help="Tokens of prompt and output together (0: the model's).")
    ] = 0,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must present; may be repeated.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of the configuration's keys.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any configuration key, e.g. engine.block_size=32."),
    ] = None,
    ray_address: Annotated[
        str, typer.Option(help="Join this Ray cluster (`auto`, or host:port) instead of starting one here.")
    ] = "local",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Serve a model behind an OpenAI endpoint. Ctrl-C or SIGTERM finishes running requests, then stops everything."""
    check_own_tree()
    given: dict[str, Any] = {
        "model.path": model,
        "model.name": name,
        "model.dtype": dtype,
        "model.max_context_tokens": max_context,
        "prefill_instances": prefill,
        "decode_instances": decode,
        "prefill.tp": prefill_tp,
        "prefill.pp": prefill_pp,
        "prefill.dp": prefill_dp,
        "prefill.ep": prefill_ep,
        "decode.tp": decode_tp,
        "decode.pp": decode_pp,
        "decode.dp": decode_dp,
        "decode.ep": decode_ep,
        "serve.host": host,
        "serve.port": port,
        "serve.log_level": log_level,
        "engine.deterministic": deterministic,
        "transfer.transport": transport,
        "transfer.kv_replicas": kv_replicas,
    }
    overrides = {key: value for key, value in given.items() if _was_given(key, value, local)}
    if any_role:
        overrides |= {"any_role": True, "prefill_instances": 0 if prefill == 1 else prefill}
    if api_key:
        overrides["serve.api_keys"] = api_key
    overrides |= dict(_key_value(text) for text in set_ or [])
    settings = load(read_yaml(config), os.environ, overrides)
    configure_logging(settings.serve.log_level, settings.serve.log_format)
    check_port(settings.serve.host, settings.serve.port)
    card = read_model_card(settings)
    _announce_start(settings, card, local)
    if local:
        from cluster.local import serve_local  # noqa: PLC0415 (torch: seconds, after all checks)

        serve_local(settings, card, lambda: _announce_ready(settings, card))
    else:
        from cluster.deploy.launch import serve_cluster  # noqa: PLC0415 (Ray: seconds, after all checks)

        serve_cluster(settings, ray_address, lambda: _announce_ready(settings, card), console.print)


_DEFAULTS: dict[str, Any] = {
    "model.path": "embedded",
    "model.name": "",
    "model.dtype": "auto",
    "model.max_context_tokens": 0,
    "prefill_instances": 1,
    "decode_instances": 1,
    "prefill.tp": 1,
    "prefill.pp": 1,
    "prefill.dp": 1,
    "prefill.ep": 1,
    "decode.tp": 1,
    "decode.pp": 1,
    "decode.dp": 1,
    "decode.ep": 1,
    "serve.host": "127.0.0.1",
    "serve.port": 8000,
    "serve.log_level": "warning",
    "engine.deterministic": False,
    "transfer.transport": "auto",
    "transfer.kv_replicas": 0,
}


def _was_given(key: str, value: Any, local: bool) -> bool:
    """A default must not hide what the file or the environment says; one process needs no separate prefill."""
    if local and key == "prefill_instances" and value == 1:
        return False
    return value != _DEFAULTS[key]


def check_port(host: str, port: int) -> None:
    """Raises ConfigError when nobody can listen there."""
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
    return key, yaml.safe_load(value)


def _announce_start(config: ClusterConfig, card: ModelCard, local: bool) -> None:
    pools = (
        "one process"
        if local
        else f"{config.decode_instances} instances of any role"
        if config.any_role
        else f"{config.prefill_instances} prefill + {config.decode_instances} decode instances"
    )
    console.print(
        f"[bold]Baton[/] serves [bold]{card.name}[/] ({card.architecture}, {card.max_context_tokens} tokens) from {pools}"
    )


def _announce_ready(config: ClusterConfig, card: ModelCard) -> None:
    host = "127.0.0.1" if config.serve.host in ("0.0.0.0", "::") else config.serve.host
    base = f"{'https' if config.serve.tls_cert else 'http'}://{host}:{config.serve.port}"
    key = ' -H "Authorization: Bearer $YOUR_KEY"' if config.serve.api_keys else ""
    prompt = "# Parse the command line.\\ndef parse_args("
    body = f'{{"model": "{card.name}", "prompt": "{prompt}", "max_tokens": 64, "temperature": 0}}'
    console.print(f"\n[green]Ready.[/] OpenAI endpoint: [bold]{base}/v1[/]   Try:\n", soft_wrap=True)
    console.print(
        f"  curl -s {base}/v1/completions -H 'Content-Type: application/json'{key} -d '{body}'\n",
        soft_wrap=True,
        markup=False,
    )
    console.print(
        f"  baton chat --base-url {base}     (Ctrl-C here stops the server)\n", soft_wrap=True, markup=False
    )
