"""Stream a completion over HTTP: `python examples/stream.py --url http://127.0.0.1:8000` beside a running `make serve`."""

import argparse
import json
from collections.abc import Iterator

import httpx


def stream(url: str, prompt: str, max_tokens: int) -> Iterator[str]:
    """Yield the pieces of the answer as they come."""
    body = {"model": "", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    with httpx.Client(base_url=url, timeout=60) as http:
        body["model"] = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        with http.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                raise SystemExit(response.read().decode())
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:  # a stream that has begun reports an error as an event
                        raise SystemExit(event["error"]["message"])
                    yield "".join(choice["text"] for choice in event["choices"])


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--prompt", default="import os\n\n\nclass Path")
    options.add_argument("--max-tokens", type=int, default=64)
    args = options.parse_args()
    for piece in stream(args.url, args.prompt, args.max_tokens):
        print(piece, end="", flush=True)
    print()
