import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "What a word means.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
asked = {"model": "openai/fake", "api_base": sys.argv[1], "api_key": "k", "num_retries": 0}
hello = [{"role": "user", "content": "hello"}]
print(litellm.completion(messages=hello, **asked).choices[0].message.content)
chunks = litellm.completion(messages=hello, stream=True, **asked)
print("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
messages = [{"role": "user", "content": "What is heliotrope?"}]
said = litellm.completion(messages=messages, tools=[TOOL], **asked).choices[0].message
messages.append(said)
for call in said.tool_calls:
    word = json.loads(call.function.arguments)["word"]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{word} is a flower"})
print(litellm.completion(messages=messages, tools=[TOOL], **asked).choices[0].message.content)
