"""A conversation in Anthropic's form, translated into the messages of a chat that every protocol shares.

    system                                  ─▶ system
    user: tool_result …, text …             ─▶ tool …, user
    assistant: thinking …, text …, tool_use ─▶ assistant with reasoning_content, content and tool_calls
    system, at any place                    ─▶ system at the same place

The same conversation gives the same messages in each of its forms: content as a text or as blocks, marks of a cached
prefix anywhere, results in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....checks import boolean, check, one_of, refusal, shown_name, told
from ....text.chat.tools import definition
from .blocks import Block, blocks_of
from .left_out import LeftOut
from .tools import SentTools

BILLING_HEADER = "x-anthropic-billing-header:"
"""How the block begins by which Claude Code tells Anthropic of itself; it changes from session to session."""
FAILED = "The tool has failed."
"""The result of a call that failed and says no more."""


@dataclass
class Conversation:
    """The messages of a chat."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    """The place in the body from which each message comes, such as "messages[2]"."""
    brought_in: set[str] = field(default_factory=set)
    """Names of the tools whose definitions the messages hold."""

    @property
    def is_prefilled(self) -> bool:
        """Return whether the answer continues the last message."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def add(self, path: str, message: dict[str, Any]) -> None:
        """Add a message that comes from a place in the body."""
        self.messages.append(message)
        self.paths.append(path)


def conversation_of(system: Any, messages: Any, tools: SentTools, left_out: LeftOut) -> Conversation:
    """Return the conversation of a body.

    `tools` are those of the same body, to which a result may refer; `left_out` takes blocks of hosted tools. Raise
    InvalidRequestError, with the place in the body, for anything that is malformed, a result without its call, and what
    this version does not have.
    """
    if not isinstance(messages, list) or not messages:
        raise refusal("messages", "none" if messages is None else told(messages), "a list of at least one message")
    conversation = Conversation()
    if text := _system_text(system, "system", left_out):
        conversation.add("system", {"role": "system", "content": text})
    calls: list[str] = []  # Ids of the last turn's calls.
    for path, role, blocks in _turns(messages, left_out):
        if role == "system":
            if text := _joined(blocks):
                conversation.add(path, {"role": "system", "content": text})
        elif role == "assistant":
            message = _assistant_message(blocks, left_out)
            calls = _call_ids(blocks)
            conversation.add(path, message)
        else:
            for call_id, block in _results(blocks, calls):
                text = _result_text(block, tools, conversation.brought_in, left_out)
                conversation.add(block.path, {"role": "tool", "tool_call_id": call_id, "content": text})
            texts = [block for block in blocks if block.kind == "text"]
            if texts or not blocks:
                conversation.add(path, {"role": "user", "content": _joined(texts)})
    _check_end(conversation)
    return conversation


def _turns(messages: Sequence[Any], left_out: LeftOut) -> Iterable[tuple[str, str, list[Block]]]:
    """Yield the path, the role and the blocks of each turn: messages of one role that follow one another are one.

    Anthropic joins them, and so results of parallel calls may come in several messages.
    """
    path, turn_role, turn_blocks = "", "", list[Block]()
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise refusal(place, told(message), "an object with role and content")
        role = check(f"{place}.role", message.get("role"), one_of("user", "assistant", "system"))
        if message.get("clear_at") not in (None, "never"):
            raise refusal(f"{place}.clear_at", told(message["clear_at"]), "never", "leave it out")
        content = message.get("content")
        if role == "user" and (content is None or content == []):
            raise refusal(f"{place}.content", told(content), "a text or a list of at least one block")
        blocks = list(blocks_of(content, f"{place}.content", role, left_out))
        if role == turn_role != "system":
            turn_blocks += blocks
            continue
        if turn_role:
            yield path, turn_role, turn_blocks
        path, turn_role, turn_blocks = place, role, blocks
    yield path, turn_role, turn_blocks


def _system_text(system: Any, path: str, left_out: LeftOut) -> str:
    """Return the text of the field `system`; empty if there is none."""
    blocks = [*blocks_of(system, path, "system", left_out)]
    return _joined(block for block in blocks if not block.text("text").startswith(BILLING_HEADER))


def _joined(blocks: Iterable[Block]) -> str:
    """Return the texts of blocks, each on lines of its own, as those of the parts of a chat's message."""
    return "\n".join(block.text("text") for block in blocks)


def _assistant_message(blocks: Sequence[Block], left_out: LeftOut) -> dict[str, Any]:
    """Return a turn of the assistant as one message.

    Its blocks are pieces of one output, so nothing stands between two texts or two thoughts but what the model wrote.
    """
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block in blocks:
        if block.kind == "text":
            texts.append(block.text("text"))
        elif block.kind == "thinking":
            thoughts.append(block.text("thinking"))
        elif block.kind == "compaction" and block.fields.get("content") is None:
            left_out.add(block.path, "compaction without content")
        elif block.kind == "compaction":
            texts.append(block.text("content"))
        elif block.kind == "tool_use":
            calls.append(_call(block))
    text = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message


def _call(block: Block) -> dict[str, Any]:
    arguments = block.fields.get("input")
    if not isinstance(arguments, dict):
        raise refusal(f"{block.path}.input", told(arguments), "an object")
    function = {"name": block.text("name"), "arguments": arguments}
    return {"id": block.text("id"), "type": "function", "function": function}


def _call_ids(blocks: Sequence[Block]) -> list[str]:
    """Return the ids of the calls among blocks; refuse one that stands twice, since a result could be of either."""
    ids: dict[str, None] = {}
    for block in blocks:
        if block.kind == "tool_use":
            if (call_id := block.text("id")) in ids:
                raise refusal(f"{block.path}.id", "the id of another call of the same turn", "an id for each call")
            ids[call_id] = None
    return list(ids)


def _results(blocks: Sequence[Block], calls: Sequence[str]) -> list[tuple[str, Block]]:
    """Return the results of a turn with the ids of their calls, in the order of the calls.

    Clients send results in the order in which the tools have ended, and the prompt of a conversation must stay.
    """
    results, known = dict[str, Block](), set(calls)
    for block in blocks:
        if block.kind != "tool_result":
            continue
        call_id, path = block.text("tool_use_id"), f"{block.path}.tool_use_id"
        if call_id not in known:
            got = "an id that no tool_use of the assistant's last turn has"
            raise refusal(path, got, "a result behind its call", "send the message with the tool_use before it")
        if call_id in results:
            raise refusal(path, "the id of another result of the same turn", "one result for each call")
        results[call_id] = block
    return [(call_id, results[call_id]) for call_id in calls if call_id in results]


def _result_text(result: Block, tools: SentTools, brought_in: set[str], left_out: LeftOut) -> str:
    """Return the text of a result. A reference to a tool becomes its definition; its name joins `brought_in`."""
    is_error = result.fields.get("is_error")
    has_failed = check(f"{result.path}.is_error", False if is_error is None else is_error, boolean)
    texts = []
    for block in blocks_of(result.fields.get("content"), f"{result.path}.content", "tool_result", left_out):
        if block.kind == "text":
            texts.append(block.text("text"))
            continue
        name = block.text("tool_name")
        if name not in tools.by_name:
            raise refusal(f"{block.path}.tool_name", shown_name(name), "the name of one of tools", "send the tool too")
        brought_in.add(name)
        texts.append(definition(tools.by_name[name]))
    return "\n".join(texts) or (FAILED if has_failed else "")


def _check_end(conversation: Conversation) -> None:
    """Check a conversation that ends with the assistant, whose message is continued; drop it if it is empty."""
    if not conversation.is_prefilled:
        return
    message, path = conversation.messages[-1], conversation.paths[-1]
    if "tool_calls" in message:
        raise refusal(path, "tool_use in the last message", "its results behind it", "send them, or leave it out")
    if not message["content"].strip() and "reasoning_content" in message:
        raise refusal(path, "a last message of thoughts alone", "one with text", "leave it out")
    if not message["content"].strip():
        conversation.messages.pop()
        conversation.paths.pop()
