import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def look_up(word: str) -> str:
    """What a word means."""
    return f"{word} is a flower"


model = OpenAILike(
    api_base=sys.argv[1],
    api_key="k",
    model="fake",
    is_chat_model=True,
    is_function_calling_model=True,
    max_retries=0,
)
print(model.chat([ChatMessage(role="user", content="hello")]).message.content)
print("".join(chunk.delta or "" for chunk in model.stream_chat([ChatMessage(role="user", content="hello")])))
tool, asked = FunctionTool.from_defaults(look_up), [ChatMessage(role="user", content="What is heliotrope?")]
answer = model.chat_with_tools([tool], chat_history=asked)
results = [
    ChatMessage(
        role="tool", content=str(tool(**call.tool_kwargs)), additional_kwargs={"tool_call_id": call.tool_id}
    )
    for call in model.get_tool_calls_from_response(answer)
]
print(model.chat_with_tools([tool], chat_history=[*asked, answer.message, *results]).message.content)
