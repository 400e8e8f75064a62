"""Lets openai-agents call a tool twice at once, and give the results back: python openai_agents_tools.py URL."""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

(url,) = sys.argv[1:]
QUESTION = "How is the weather in Rome and in Paris?"


async def turn(model_type, *, is_stream):
    """Return the calls and the text of a turn."""
    calls = []

    @function_tool
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        calls.append({"city": city})
        return f"It rains in {city}."

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = model_type(model="scripted", openai_client=client)
    agent = Agent(name="forecaster", instructions="Be brief.", model=model, tools=[weather])
    if is_stream:
        run = Runner.run_streamed(agent, QUESTION)
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, QUESTION)
    return {"calls": sorted(calls, key=lambda call: call["city"], reverse=True), "text": run.final_output}


async def main():
    set_tracing_disabled(True)
    found = {}
    for name, model_type in (("chat completions", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
        found[name] = await turn(model_type, is_stream=False)
        found[f"{name}, stream"] = await turn(model_type, is_stream=True)
    print(json.dumps(found))


asyncio.run(main())
