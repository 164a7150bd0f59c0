import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def look_up(word: str) -> str:
    """What a word means."""
    return f"{word} is a flower"


async def streamed(agent: Agent) -> str:
    answer = Runner.run_streamed(agent, "hello")
    async for _ in answer.stream_events():
        pass
    return answer.final_output


async def main() -> None:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=sys.argv[1], api_key="k", max_retries=0))
    plain = Agent(name="plain", model="fake")
    print((await Runner.run(plain, "hello")).final_output)
    print(await streamed(plain))
    agent = Agent(name="with a tool", model="fake", tools=[look_up])
    print((await Runner.run(agent, "What is heliotrope?")).final_output)


asyncio.run(main())
