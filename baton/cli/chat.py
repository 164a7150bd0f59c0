"""`baton chat`: talk to any OpenAI endpoint in the terminal; with input from a pipe, one prompt a line."""

import json
import readline
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from baton.bench.sse import DONE, SseReader, error_message
from core.errors import ConfigError, RequestError

_RESUME_S, _PAUSE_S = 30.0, 0.5
"""How long an answer whose connection broke is asked for again, and how often."""
_HELP = "/clear forgets the conversation, /exit ends (so does Ctrl-D), Ctrl-C stops an answer"


def chat(
    base_url: Annotated[
        str, typer.Option(envvar="OPENAI_BASE_URL", help="The endpoint; /v1 may be left out.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name (default: the first that the endpoint lists).")] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Sampling temperature (default: the server's).")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = "",
) -> None:
    """Chat with a model, streaming."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = base_url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(10, read=600)) as http:
            options: dict[str, Any] = {"model": model or _first_model(http, base), "max_tokens": max_tokens}
            if temperature is not None:
                options["temperature"] = temperature
            opening = [{"role": "system", "content": system}] if system else []
            num_failed = _converse(http, options, opening)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{base_url} is no URL: {error}") from None
    if num_failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def _converse(http: httpx.Client, options: dict[str, Any], opening: list[dict[str, str]]) -> int:
    """Converse until the input ends. Returns the number of prompts that were not answered."""
    console = Console(highlight=False, markup=False)
    interactive = sys.stdin.isatty()
    if interactive:
        readline.set_history_length(1000)  # importing readline gives input() line editing
        console.print(f"{options['model']} at {http.base_url}   {_HELP}")
    history, num_failed = list(opening), 0
    for prompt in _prompts(interactive=interactive):
        match prompt.strip():
            case "":
                continue
            case "/exit" | "/quit":
                break
            case "/help":
                console.print(_HELP)
                continue
            case "/clear":
                history = list(opening)
                continue
            case _:
                pass
        asked = {"role": "user", "content": prompt}
        try:
            answer = _answer(http, {**options, "messages": [*history, asked]}, interactive=interactive)
        except (RequestError, httpx.HTTPError) as error:
            num_failed += 1
            print(f"error: {error or type(error).__name__}", file=sys.stderr, flush=True)
            continue
        if answer:
            history += [asked, {"role": "assistant", "content": answer}]
    return num_failed


def _prompts(*, interactive: bool) -> Iterator[str]:
    while True:
        try:
            yield input("> " if interactive else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()


def _answer(http: httpx.Client, body: dict[str, Any], *, interactive: bool) -> str:
    """Print the answer as it comes. At a terminal, Ctrl-C ends it and leaves what has come."""
    answer = ""
    try:
        with closing(_stream(http, body)) as pieces:
            for piece in pieces:
                answer += piece
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not interactive:
            raise
        print(" (stopped)", end="")
    finally:
        print(flush=True)
    return answer


def _stream(http: httpx.Client, body: dict[str, Any]) -> Generator[str, None, None]:
    """Yield the pieces of the answer. Where its connection breaks it goes on behind the last event, from whichever server the
    endpoint has then. Raises RequestError with the server's own words, or httpx.HTTPError."""
    last_id, broken_at = b"", None
    while True:
        reader = SseReader()
        try:
            for payload in _payloads(http, body, reader, last_id):
                if payload == DONE:
                    return
                last_id, broken_at = reader.last_id, None
                yield _piece(payload)
            failure = httpx.RemoteProtocolError("the answer broke off")
        except httpx.TransportError as error:
            failure = error
        broken_at = broken_at or time.monotonic()
        if not last_id or time.monotonic() - broken_at > _RESUME_S:
            raise failure
        time.sleep(_PAUSE_S)


def _payloads(
    http: httpx.Client, body: dict[str, Any], reader: SseReader, last_id: bytes
) -> Generator[bytes, None, None]:
    headers = {"Last-Event-ID": last_id.decode()} if last_id else {}
    with http.stream(
        "POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers
    ) as answer:
        if last_id and answer.status_code in (502, 503):
            raise httpx.RemoteProtocolError(f"HTTP {answer.status_code}")
        if answer.status_code != 200:
            raise RequestError(f"HTTP {answer.status_code}: {error_message(answer.read())}")
        for received in answer.iter_bytes():
            yield from reader.feed(received)


def _piece(payload: bytes) -> str:
    event = json.loads(payload)
    if "error" in event:
        raise RequestError(error_message(payload))
    return "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices") or ())


def _first_model(http: httpx.Client, base: str) -> str:
    try:
        answer = http.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise ConfigError(
            f"{base}/v1/models answers {error.response.status_code}: is --api-key right?"
        ) from None
    except (httpx.HTTPError, LookupError, ValueError, TypeError) as error:
        raise ConfigError(f"no OpenAI endpoint answers at {base}: {error}") from None
