"""Tables of fields cover OpenAI's and Anthropic's packages, and the documentation shows the tables as they are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params, tool_union_param
from anthropic.types.beta import (
    beta_content_block_param,
    beta_tool_param,
    beta_tool_result_block_param,
    beta_tool_union_param,
)
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import ToolParam, response_create_params
from openai.types.responses.response_input_param import ResponseInputItemParam

from jpaged.limits import LIMITS
from jpaged.serving.protocols.chat.fields import CHAT_FIELDS
from jpaged.serving.protocols.completions.fields import COMPLETION_FIELDS
from jpaged.serving.protocols.fields import BodyField, Use
from jpaged.serving.protocols.messages.blocks import HOSTED_BLOCKS, REFUSED_BLOCKS, TAKEN_BLOCKS
from jpaged.serving.protocols.messages.fields import MESSAGE_FIELDS
from jpaged.serving.protocols.messages.tools import TOOL_KEYS, TYPED_TOOL
from jpaged.serving.protocols.responses.fields import RESPONSE_FIELDS
from jpaged.serving.protocols.responses.input_items import READERS, REFUSED_ITEMS
from jpaged.serving.protocols.responses.tools import HOSTED_KINDS, KINDS

DOCS = Path(__file__).parents[3] / "docs"
PAGE, RESPONSES_PAGE = ((DOCS / name).read_text() for name in ("serving.md", "responses.md"))
ROWS = {
    Use.SAMPLING: "a sampling parameter", Use.PROMPT: "how the prompt is made or scheduled",
    Use.PROTOCOL: "read by the route", Use.IGNORED: "taken, without meaning here",
    Use.REFUSED: "refused by name, unless the value asks for nothing",
}  # fmt: skip


@pytest.mark.parametrize(
    ("types", "table"),
    [
        (chat_create_params.CompletionCreateParamsStreaming, CHAT_FIELDS),
        (chat_create_params.CompletionCreateParamsNonStreaming, CHAT_FIELDS),
        (completion_create_params.CompletionCreateParamsStreaming, COMPLETION_FIELDS),
        (completion_create_params.CompletionCreateParamsNonStreaming, COMPLETION_FIELDS),
        (response_create_params.ResponseCreateParamsStreaming, RESPONSE_FIELDS),
        (response_create_params.ResponseCreateParamsNonStreaming, RESPONSE_FIELDS),
    ],
)
def test_every_field_of_openais_package_is_in_the_table(types: type, table: dict[str, BodyField]):
    names = {name for one in types.__mro__ for name in getattr(one, "__annotations__", {})}
    assert "model" in names | set(types.__annotations__) | _inherited(types)
    assert (names | _inherited(types)) - table.keys() == set()


@pytest.mark.parametrize(("route", "table"), [("completions", COMPLETION_FIELDS), ("chat", CHAT_FIELDS)])
def test_every_field_of_vllms_protocols_is_in_the_table(route: str, table: dict[str, BodyField]):
    names = json.loads((Path(__file__).parent / "vllm_fields.json").read_text())[route]
    assert set(names) - table.keys() == set()


@pytest.mark.parametrize(
    "types",
    [
        message_create_params.MessageCreateParamsStreaming,
        beta_create_params.MessageCreateParamsStreaming,
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_tokens_params.MessageCountTokensParams,
    ],
)
def test_every_field_of_anthropics_package_is_in_the_table(types: type):
    names = set(get_type_hints(types))
    assert {"model", "messages"} <= names
    assert names - MESSAGE_FIELDS.keys() == set()


def kinds_of(union: Any) -> Iterator[str]:
    """Yield what the key `type` may hold in the objects of a union of the package's."""
    for one in get_args(union):
        hints = get_type_hints(one) if isinstance(one, type) else {}
        pending = [hints.get("type")]
        while pending:
            hint = pending.pop()
            pending += [inner for inner in get_args(hint) if not isinstance(inner, str)]
            yield from (word for word in get_args(hint) if isinstance(word, str))


def test_every_block_and_tool_of_anthropics_package_is_known():
    of_results = get_args(get_type_hints(beta_tool_result_block_param.BetaToolResultBlockParam)["content"])
    blocks = {*kinds_of(beta_content_block_param.BetaContentBlockParam), *kinds_of(get_args(of_results[1])[0])}
    assert {"text", "tool_reference", "server_tool_use"} <= blocks
    assert (
        blocks - {*HOSTED_BLOCKS, *REFUSED_BLOCKS, *(kind for kinds in TAKEN_BLOCKS.values() for kind in kinds)}
        == set()
    )
    tools = {*kinds_of(beta_tool_union_param.BetaToolUnionParam), *kinds_of(tool_union_param.ToolUnionParam)}
    assert "web_search_20250305" in tools
    assert [kind for kind in tools if kind != "custom" and not TYPED_TOOL.fullmatch(kind)] == []
    assert set(get_type_hints(beta_tool_param.BetaToolParam)) == TOOL_KEYS


def test_every_item_and_tool_of_openais_responses_is_known():
    items, tools = set(kinds_of(ResponseInputItemParam)), set(kinds_of(ToolParam))
    assert {"message", "function_call_output", "reasoning"} <= items
    assert READERS.keys() - items == set()
    assert items - READERS.keys() - set(REFUSED_ITEMS) == set()
    assert "web_search" in tools
    assert tools - {*KINDS, *HOSTED_KINDS} == set()


def _inherited(types: type) -> set[str]:
    """Return the names of a TypedDict and of its bases."""
    bases = (types, *getattr(types, "__orig_bases__", ()))
    return {name for base in bases for name in getattr(base, "__annotations__", {})}


@pytest.mark.parametrize("use", Use)
def test_the_page_shows_what_becomes_of_each_field(use: Use):
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {ROWS[use]}"))
    both, completions, chats = (set(re.findall(r"`(\w+)`", cell)) for cell in line.split("|")[2:5])
    of_completions = {name for name, one in COMPLETION_FIELDS.items() if one.use is use}
    of_chats = {name for name, one in CHAT_FIELDS.items() if one.use is use}
    assert both == of_completions & of_chats
    assert completions == of_completions - of_chats
    assert chats == of_chats - of_completions


@pytest.mark.parametrize("use", [use for use in Use if use is not Use.REFUSED])
def test_the_page_shows_what_becomes_of_each_field_of_messages(use: Use):
    table = PAGE.partition("## Messages")[2]
    line = next(line for line in table.splitlines() if line.startswith(f"| {ROWS[use]}"))
    assert set(re.findall(r"`(\w+)`", line)) == {name for name, one in MESSAGE_FIELDS.items() if one.use is use}


@pytest.mark.parametrize("use", Use)
def test_the_page_of_responses_shows_what_becomes_of_each_field(use: Use):
    line = next(line for line in RESPONSES_PAGE.splitlines() if line.startswith(f"| {ROWS[use]}"))
    assert set(re.findall(r"`(\w+)`", line)) == {name for name, one in RESPONSE_FIELDS.items() if one.use is use}


def test_the_page_shows_every_limit():
    for name, limit in LIMITS.items():
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` ")]
        assert limit.meaning in line
        shown = "–" if limit.server_default is None else f"{limit.server_default:,}"
        assert line.split("|")[3].split()[0] == shown
