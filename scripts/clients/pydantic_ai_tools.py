"""Lets pydantic-ai call a tool twice at once, and go on with the conversation: python pydantic_ai_tools.py URL."""

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

(url,) = sys.argv[1:]
QUESTION = "How is the weather in Rome and in Paris?"


async def turn(model_type, *, is_stream):
    """Return the calls and the text of a turn."""
    model = model_type("scripted", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent, calls = Agent(model, system_prompt="Be brief."), []

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        calls.append({"city": city})
        return f"It rains in {city}."

    async def read(_, events):
        async for _ in events:
            pass

    # `run_stream` would end at the first text, also where calls follow it.
    ran = await agent.run(QUESTION, event_stream_handler=read if is_stream else None)
    return {"calls": sorted(calls, key=lambda call: call["city"], reverse=True), "text": ran.output}


async def main():
    found = {}
    for name, model_type in (("chat completions", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
        found[name] = await turn(model_type, is_stream=False)
        found[f"{name}, stream"] = await turn(model_type, is_stream=True)
    print(json.dumps(found))


asyncio.run(main())
