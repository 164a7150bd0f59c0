"""An answer of a given shape: `python examples/structured.py --url http://127.0.0.1:8000` beside a running server.

The server guarantees the shape, whatever the model knows; the embedded one fills it with nonsense."""

import argparse
import json
from typing import Any

import httpx

SCHEMA = {
    "type": "object",
    "properties": {
        "language": {"enum": ["Python", "Rust", "C++"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["language", "stars", "tags"],
    "additionalProperties": False,
}


def ask(url: str, question: str) -> dict[str, Any]:
    with httpx.Client(base_url=url, timeout=60) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "review", "schema": SCHEMA}},
            "max_tokens": 1024,
            "temperature": 0,
        }
        answer = http.post("/v1/chat/completions", json=body)
        if answer.is_error:
            raise SystemExit(answer.json()["error"]["message"])
        return json.loads(answer.json()["choices"][0]["message"]["content"])


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--question", default="import os\n\n\nclass Path")
    args = options.parse_args()
    review = ask(args.url, args.question)
    print(f"{review['language']}: {review['stars']} of 5, {', '.join(review['tags'])}")
