import sys

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings


@tool
def look_up(word: str) -> str:
    """What a word means."""
    return f"{word} is a flower"


model = ChatOllama(base_url=sys.argv[1], model="fake", validate_model_on_init=True)
print(model.invoke("hello").content)
print("".join(chunk.text for chunk in model.stream("hello")))
messages = [("user", "What is heliotrope?")]
calls = model.bind_tools([look_up]).invoke(messages)
results = [ToolMessage(look_up.invoke(call["args"]), tool_call_id=call["id"]) for call in calls.tool_calls]
print(model.bind_tools([look_up]).invoke([*messages, calls, *results]).content)
schema = {"title": "A", "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
print(model.with_structured_output(schema).invoke("json"))
thought = ChatOllama(base_url=sys.argv[1], model="fake", reasoning=True).invoke("think")
print(
    thought.additional_kwargs["reasoning_content"],
    thought.content,
    thought.usage_metadata["output_tokens"] > 0,
)
print(
    [
        len(vector)
        for vector in OllamaEmbeddings(base_url=sys.argv[2], model="fake").embed_documents(["a", "b"])
    ]
)
