import sys

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def look_up(word: str) -> str:
    """What a word means."""
    return f"{word} is a flower"


model = ChatOpenAI(base_url=sys.argv[1], api_key="k", model="fake", max_retries=0)
print(model.invoke("hello").content)
print("".join(chunk.text for chunk in model.stream("hello")))
messages = [("user", "What is heliotrope?")]
calls = model.bind_tools([look_up]).invoke(messages)
results = [ToolMessage(look_up.invoke(call["args"]), tool_call_id=call["id"]) for call in calls.tool_calls]
print(model.bind_tools([look_up]).invoke([*messages, calls, *results]).content)
