"""The table of fields covers OpenAI's interface, and the page of the documentation shows the tables as they are."""

import json
import re
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from jpaged.limits import LIMITS
from jpaged.serving.protocols.chat.fields import CHAT_FIELDS
from jpaged.serving.protocols.completions.fields import COMPLETION_FIELDS
from jpaged.serving.protocols.fields import BodyField, Use

PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
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


def test_the_page_shows_every_limit():
    for name, limit in LIMITS.items():
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` ")]
        assert limit.meaning in line
        shown = "–" if limit.server_default is None else f"{limit.server_default:,}"
        assert line.split("|")[3].split()[0] == shown
