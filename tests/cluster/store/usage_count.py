"""What a client counts of the answers that it has got."""

import json
from collections import Counter

import httpx


def count(counted: Counter[str], answer: httpx.Response) -> None:
    """Add what an answer says that it has used, whole or streamed."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("application/json"):
        usage = answer.json()["usage"]
    else:
        events = [
            line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")
        ]
        (usage,) = (found for event in events if (found := json.loads(event).get("usage")))
    counted["requests"] += 1
    counted["prompt"] += usage["prompt_tokens"]
    counted["output"] += usage.get("completion_tokens", 0)
