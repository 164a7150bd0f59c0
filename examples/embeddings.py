"""The text nearest to a question, beside a server with model.pooling=mean.

    python examples/embeddings.py --url http://127.0.0.1:8000

The embedded model was not trained for this: what it finds is near in form rather than in meaning."""

import argparse

from openai import OpenAI

QUESTION = "def subtract(a, b):\n    return a - b"
TEXTS = [
    "def add(x, y):\n    return x + y",
    "class Path:\n    def exists(self):",
    "The quick brown fox jumps over the lazy dog.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.embeddings.create(model=model, input=[QUESTION, *TEXTS])
    asked, *others = (each.embedding for each in answer.data)
    nearness = [sum(a * b for a, b in zip(asked, other, strict=True)) for other in others]
    for near, text in sorted(zip(nearness, TEXTS, strict=True), reverse=True):
        print(f"{near:.3f}  {text.splitlines()[0]}")


if __name__ == "__main__":
    main()
