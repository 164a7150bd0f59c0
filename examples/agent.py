"""An agent's loop over plain chat: `python examples/agent.py --url http://127.0.0.1:8000 "How long is 'baton'?"`

The endpoint has no tools yet, so the loop has a protocol of its own: the model calls one by a line of JSON, such as
{"tool": "length", "text": "baton"}, is told the result in the next turn, and ends with a turn that has no such line. A model has
to be able to follow that; the embedded one only continues Python, so with it the first turn is also the last."""

import argparse
import json
from collections.abc import Callable

import httpx

TOOLS = {"length": lambda text: str(len(text)), "reverse": lambda text: text[::-1]}
SYSTEM = (
    'Call a tool by one line of JSON, {"tool": NAME, "text": TEXT}, and wait for its result; '
    f"tools: {', '.join(TOOLS)}. Otherwise answer in plain words."
)
Messages = list[dict[str, str]]


def tool_result(answer: str) -> str | None:
    """Return the result of the first tool that the answer calls, or None where it calls none."""
    for line in answer.splitlines():
        try:
            call = json.loads(line)
        except ValueError:
            continue
        if isinstance(call, dict) and "tool" in call:
            tool = TOOLS.get(str(call["tool"]))
            return tool(str(call.get("text", ""))) if tool else f"there is no tool {call['tool']}"
    return None


def run(chat: Callable[[Messages], str], question: str, most_turns: int) -> str:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(most_turns):
        answer = chat(messages)
        print(f"model: {answer}")
        if (result := tool_result(answer)) is None:
            return answer
        print(f"tool: {result}")
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": f"Result: {result}"})
    raise SystemExit(f"no answer within {most_turns} turns")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("question", nargs="?", default="Return the length of the word baton.")
    options.add_argument("--url", default="http://127.0.0.1:8000")
    args = options.parse_args()
    with httpx.Client(base_url=args.url, timeout=60) as http:
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]

        def chat(messages: Messages) -> str:
            body = {"model": model, "messages": messages, "max_tokens": 128, "temperature": 0}
            answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
            return answer["choices"][0]["message"]["content"]

        run(chat, args.question, most_turns=8)
