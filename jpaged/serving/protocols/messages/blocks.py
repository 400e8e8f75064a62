"""The content of one message in Anthropic's form: a text, or a list of blocks, each with its place in the body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ....checks import refusal, shown_name, told
from .left_out import LeftOut

TAKEN_BLOCKS: dict[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use", "compaction"),
    "system": ("text",),
    "tool_result": ("text", "tool_reference"),
}
"""Whose content → the types of its blocks that are read."""
HOSTED_BLOCKS = (
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "advisor_tool_result",
    "code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
    "tool_search_tool_result", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing", "fallback",
)  # fmt: skip
"""Types of blocks that tell of what another server has run, which are left out."""
REFUSED_BLOCKS = (
    "image", "document", "search_result", "container_upload", "browser_state", "tool_addition", "tool_removal",
)  # fmt: skip
"""Types of blocks that this version refuses by name."""


class Block(NamedTuple):
    """One block and its place, such as "messages[2].content[0]"."""

    kind: str
    fields: dict[str, Any]
    path: str

    def text(self, name: str) -> str:
        """Return the text in a field of the block. Raise InvalidRequestError if there is none."""
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise refusal(f"{self.path}.{name}", told(value), "a text")
        return value


def blocks_of(content: Any, path: str, owner: str, left_out: LeftOut) -> Iterator[Block]:
    """Yield the blocks of a content; a text is one block of the type text, and null is none.

    `owner` is a key of TAKEN_BLOCKS. `left_out` takes blocks of HOSTED_BLOCKS. Raise InvalidRequestError for anything
    that is no block, and for a type that does not belong there.
    """
    if isinstance(content, str):
        yield Block("text", {"text": content}, path)
        return
    if content is not None and not isinstance(content, list):
        raise refusal(path, told(content), "a text or a list of blocks")
    for index, fields in enumerate(content or ()):
        place = f"{path}[{index}]"
        if not isinstance(fields, dict):
            raise refusal(place, told(fields), "a block: an object with a type")
        kind = fields.get("type")
        if kind in TAKEN_BLOCKS[owner]:
            yield Block(kind, fields, place)
        elif kind in HOSTED_BLOCKS:
            left_out.add(place, kind)
        else:
            raise _refused_type(kind, place, owner)


def _refused_type(kind: Any, path: str, owner: str) -> Exception:
    """Return the error about a block of a type that is not taken at its place."""
    allowed = " or ".join(TAKEN_BLOCKS[owner])
    if not isinstance(kind, str):
        return refusal(f"{path}.type", told(kind), allowed)
    if kind in REFUSED_BLOCKS:
        return refusal(f"{path}.type", f"{kind}, which is not available in this version", allowed, "send text")
    return refusal(f"{path}.type", f"{shown_name(kind)} in the content of {owner}", allowed)
