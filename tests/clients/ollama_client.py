"""Ollama's own Python client: `URL EMBEDS SEES IMAGE`, where the first server talks, and the others embed and see."""

import json
import sys

from ollama import Client, ResponseError
from ollama._types import ChatRequest, EmbedRequest, GenerateRequest, Options

HELLO = [{"role": "user", "content": "hello"}]


def look_up(word: str) -> str:
    """What a word means.

    Args:
        word: The word.
    """
    return f"{word} is a flower"


client, embeds, sees = map(Client, sys.argv[1:4])
print(client.chat("fake", HELLO).message.content)
print("".join(part.message.content for part in client.chat("fake", HELLO, stream=True)))
for stream in (False, True):
    messages = [{"role": "user", "content": "What is heliotrope?"}]
    asked = client.chat("fake", messages, tools=[look_up], stream=stream)
    parts = list(asked) if stream else [asked]
    messages += [part.message for part in parts if part.message.tool_calls]
    for call in messages[-1].tool_calls:
        told = look_up(**call.function.arguments)
        messages.append({"role": "tool", "content": told, "tool_name": call.function.name})
    print(client.chat("fake", messages, tools=[look_up]).message.content)

schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
print(json.loads(client.chat("fake", [{"role": "user", "content": "json"}], format=schema).message.content))
print(client.generate("fake", "hello", options={"num_predict": 3, "seed": 1}).done_reason)
thought = client.generate("fake", "think", think=True)
print(thought.thinking, thought.response, thought.eval_count > 0, thought.eval_duration > 0)
context = client.generate("fake", "hello").context
print(client.generate("fake", "hello", context=context).prompt_eval_count > len(context))
print(sees.chat("fake", [{"role": "user", "content": "see", "images": [sys.argv[4]]}]).message.content)
print(
    [len(vector) for vector in embeds.embed("fake", ["a", "b"]).embeddings],
    len(embeds.embeddings("fake", "a").embedding),
)
try:
    list(client.chat("llama3", HELLO, stream=True))
except ResponseError as error:
    print(error.status_code, error.error)
print([model.model for model in client.list().models], [model.name for model in client.ps().models])
print(client.show("fake").capabilities, [part.status for part in client.pull("fake", stream=True)])
print(
    json.dumps(
        {
            kind.__name__: list(kind.model_fields)
            for kind in (ChatRequest, GenerateRequest, EmbedRequest, Options)
        }
    )
)
