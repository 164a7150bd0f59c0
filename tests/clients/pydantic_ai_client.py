import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("fake", provider=OpenAIProvider(base_url=sys.argv[1], api_key="k"))
plain, agent = Agent(model), Agent(model)


@agent.tool_plain
def look_up(word: str) -> str:
    """What a word means."""
    return f"{word} is a flower"


async def streamed() -> str:
    async with plain.run_stream("hello") as answer:
        return await answer.get_output()


print(plain.run_sync("hello").output)
print(asyncio.run(streamed()))
print(agent.run_sync("What is heliotrope?").output)
