"""An agent's loop with tools: `python examples/agent.py --url http://127.0.0.1:8000 "How long is 'baton'?"`

The model calls tools, is told their results, and ends with a turn that calls none. With the embedded model, which knows no tools,
that is the first, and its server needs `--tool-call-parser hermes`. The server is told when the session is over."""

import argparse
import json
import uuid
from collections.abc import Callable
from typing import Any

import httpx

TOOLS = {"length": lambda text: str(len(text)), "reverse": lambda text: text[::-1]}
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
DECLARED = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in TOOLS]
Message = dict[str, Any]


def result_of(call: Message) -> str:
    """Run what the model calls. Models make mistakes: they are told what was wrong, as they are told results."""
    tool = TOOLS.get(call["function"]["name"])
    if tool is None:
        return f"there is no tool {call['function']['name']}"
    try:
        return tool(str(json.loads(call["function"]["arguments"])["text"]))
    except (ValueError, KeyError, TypeError):
        return "the arguments must be an object with a text"


def run(chat: Callable[[list[Message]], Message], question: str, most_turns: int) -> str:
    messages: list[Message] = [{"role": "user", "content": question}]
    for _ in range(most_turns):
        answer = chat(messages)
        print(f"model: {answer['content'] or ''}")
        messages.append(answer)  # with its calls, as it came
        if not answer.get("tool_calls"):
            return answer["content"]
        for call in answer["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result_of(call)})
            print(f"tool {call['function']['name']}: {messages[-1]['content']}")
    raise SystemExit(f"no answer within {most_turns} turns")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("question", nargs="?", default="Return the length of the word baton.")
    options.add_argument("--url", default="http://127.0.0.1:8000")
    args = options.parse_args()
    with httpx.Client(base_url=args.url, timeout=60) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        hints = {"session": str(uuid.uuid4()), "ttl_s": 60}
        fixed = {"model": model, "tools": DECLARED, "max_tokens": 128, "cache_hints": hints}

        def chat(messages: list[Message]) -> Message:
            answer = http.post("/v1/chat/completions", json={**fixed, "messages": messages})
            return answer.raise_for_status().json()["choices"][0]["message"]

        run(chat, args.question, most_turns=8)
        http.post("/v1/cache_hints", json={"session": hints["session"], "action": "release"})
