"""A batch of requests, beside a server with serve.store set.

python examples/batch.py --url http://127.0.0.1:8000
"""

import argparse
import json
import time

from openai import OpenAI

ENDPOINT = "/v1/completions"
NUM_LINES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    lines = [
        {
            "custom_id": f"sum {number}",
            "method": "POST",
            "url": ENDPOINT,
            "body": {"model": model, "prompt": f"{number} + 1 =", "max_tokens": 8},
        }
        for number in range(NUM_LINES)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("sums.jsonl", text), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id, batch
    for line in client.files.content(batch.output_file_id).text.splitlines():
        answer = json.loads(line)
        print(f"{answer['custom_id']}: {answer['response']['body']['choices'][0]['text']!r}")


if __name__ == "__main__":
    main()
