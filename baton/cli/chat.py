"""`baton chat`: talk to any OpenAI endpoint in the terminal; with input from a pipe, one prompt a line."""

import contextlib
import json
import readline
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from core.errors import ConfigError

_HELP = "/clear forgets the conversation, /exit ends (so does Ctrl-D), Ctrl-C stops an answer"


def chat(
    base_url: Annotated[
        str, typer.Option(envvar="OPENAI_BASE_URL", help="The endpoint; /v1 may be left out.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name (default: the first that the endpoint lists).")] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[float | None, typer.Option(min=0, max=2)] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY")] = "",
) -> None:
    """Chat with a model, streaming."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = base_url.rstrip("/").removesuffix("/v1")
    with httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(10, read=600)) as http:
        name = model or _first_model(http, base)
        options: dict[str, Any] = {"model": name, "max_tokens": max_tokens}
        if temperature is not None:
            options["temperature"] = temperature
        _converse(http, options, [{"role": "system", "content": system}] if system else [])


def _converse(http: httpx.Client, options: dict[str, Any], opening: list[dict[str, str]]) -> None:
    console = Console(highlight=False)
    interactive = sys.stdin.isatty()
    if interactive:
        readline.set_history_length(1000)  # importing readline gives input() line editing
        console.print(f"[bold]{options['model']}[/] at {http.base_url}   {_HELP}")
    history = list(opening)
    for prompt in _prompts(interactive):
        match prompt.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/help":
                console.print(_HELP)
                continue
            case "/clear":
                history = list(opening)
                continue
            case _:
                pass
        history.append({"role": "user", "content": prompt})
        answer = ""
        try:
            for piece in _stream(http, {**options, "messages": history}):
                answer += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            console.print(" [dim](stopped)[/]", end="")
        except httpx.HTTPError as error:
            raise ConfigError(f"the endpoint is gone: {error}") from None
        print(flush=True)
        history.append({"role": "assistant", "content": answer})


def _prompts(interactive: bool) -> Iterator[str]:
    while True:
        try:
            yield input("> " if interactive else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            print()


def _stream(http: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            answer.read()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                raise ConfigError(answer.json()["error"]["message"])
            raise ConfigError(f"HTTP {answer.status_code}")
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                if "error" in event:
                    raise ConfigError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""


def _first_model(http: httpx.Client, base: str) -> str:
    try:
        answer = http.get("/v1/models")
        answer.raise_for_status()
        return answer.json()["data"][0]["id"]
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"no OpenAI endpoint answers at {base}: {error}") from None
