"""Lets LangChain's ChatOpenAI call a tool twice at once, and give the results back: python langchain_tools.py URL."""

import json
import sys

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

(url,) = sys.argv[1:]


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"It rains in {city}."


WAYS = {
    "chat completions": {},
    "responses": {"use_responses_api": True},
    "responses, thoughts encrypted": {
        "use_responses_api": True, "output_version": "responses/v1", "store": False,
        "include": ["reasoning.encrypted_content"],
    },
}  # fmt: skip


def turn(*, is_stream, **options):
    """Return the calls and the text of a turn."""
    chat = ChatOpenAI(model="scripted", base_url=f"{url}/v1", api_key="none", max_retries=0, **options)
    model = chat.bind_tools([weather])
    messages = [SystemMessage("Be brief."), HumanMessage("How is the weather in Rome and in Paris?")]

    def ask():
        if not is_stream:
            return model.invoke(messages)
        whole, *pieces = model.stream(messages)
        for piece in pieces:
            whole += piece
        return whole

    messages.append(ask())
    calls = messages[-1].tool_calls
    messages += [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in calls]
    return {"calls": [call["args"] for call in calls], "text": ask().text}


found = {}
for name, options in WAYS.items():
    found[name] = turn(is_stream=False, **options)
    found[f"{name}, stream"] = turn(is_stream=True, **options)
print(json.dumps(found))
