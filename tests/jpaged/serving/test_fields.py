"""The table of fields covers OpenAI's interface, and the page of the documentation shows the tables as they are."""

import re
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from jpaged.limits import LIMITS
from jpaged.serving.protocols.fields import CHAT_FIELDS, COMPLETION_FIELDS, BodyField, Role

PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
ROWS = {
    Role.SAMPLING: "a sampling parameter", Role.PROMPT: "how the prompt is made or scheduled",
    Role.ROUTE: "read by the route", Role.KEPT: "taken, without meaning here",
    Role.MISSING: "refused by name, unless the value asks for nothing",
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


def _inherited(types: type) -> set[str]:
    """Return the names of a TypedDict and of its bases."""
    bases = (types, *getattr(types, "__orig_bases__", ()))
    return {name for base in bases for name in getattr(base, "__annotations__", {})}


@pytest.mark.parametrize("role", Role)
def test_the_page_shows_what_becomes_of_each_field(role: Role):
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {ROWS[role]}"))
    both, completions, chats = (set(re.findall(r"`(\w+)`", cell)) for cell in line.split("|")[2:5])
    of_completions = {name for name, one in COMPLETION_FIELDS.items() if one.role is role}
    of_chats = {name for name, one in CHAT_FIELDS.items() if one.role is role}
    assert both == of_completions & of_chats
    assert completions == of_completions - of_chats
    assert chats == of_chats - of_completions


def test_the_page_shows_every_limit():
    for name, limit in LIMITS.items():
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` ")]
        assert limit.meaning in line
        shown = "–" if limit.served is None else f"{limit.served:,}"
        assert line.split("|")[3].split()[0] == shown
