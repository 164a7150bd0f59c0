"""Stream an answer with its reasoning apart: `python examples/reasoning.py --url http://127.0.0.1:8000` beside a running server.

A model that does not reason, such as the embedded one, answers at once."""

import argparse
import json
from collections.abc import Iterator

import httpx


def stream(url: str, question: str, max_tokens: int) -> Iterator[tuple[str, str]]:
    """Yield pieces as they come, each with what it is: `reasoning` or `content`."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0}
    with httpx.Client(base_url=url, timeout=60) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        with http.stream(
            "POST", "/v1/chat/completions", json={**body, "model": model, "stream": True}
        ) as response:
            if response.is_error:
                raise SystemExit(response.read().decode())
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:  # a stream that has begun reports an error as an event
                        raise SystemExit(event["error"]["message"])
                    for choice in event["choices"]:
                        for kind in ("reasoning", "content"):
                            if piece := choice["delta"].get(kind):
                                yield kind, piece


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--question", default="import os\n\n\nclass Path")
    options.add_argument("--max-tokens", type=int, default=64)
    args = options.parse_args()
    said = ""
    for kind, piece in stream(args.url, args.question, args.max_tokens):
        print(piece if kind == said else f"\n[{kind}]\n{piece}", end="", flush=True)
        said = kind
    print()
