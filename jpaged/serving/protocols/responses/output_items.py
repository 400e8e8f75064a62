"""Makes the items of a response's output of the events of an answer, and the events of a stream that tell of them.

Thoughts, text and each call are an item of their own, in the order in which the model wrote them. Every event of a
stream follows from what is read here, so that the items of a stream are those of a complete response.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ....text.answers.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from ..call_ids import call_id
from .details import ResponseDetails
from .thoughts import sealed
from .tools import SEARCH_NAME

Tell = Callable[[str, dict[str, Any]], None]
"""Tells the client of an event: its type, and its fields beside `type` and `sequence_number`."""


class _Item(ABC):
    """An item that is being written. Subclasses say what it looks like, and which events tell of its text."""

    kind: str
    id_prefix: str
    delta_event: str
    """The event of a piece of its text; "" where no event tells of pieces."""

    def __init__(self, tell: Tell, response_id: str, index: int):
        self.id = f"{self.id_prefix}_{response_id.partition('_')[2]}_{index}"
        self._tell, self._pieces = tell, list[str]()
        self._place: dict[str, Any] = {"item_id": self.id, "output_index": index}

    def start(self) -> None:
        self._tell("response.output_item.added", {"output_index": self._place["output_index"], "item": self.begun()})

    def write(self, text: str, **fields: Any) -> None:
        self._pieces.append(text)
        if self.delta_event:
            self._tell(self.delta_event, {**self._place, "delta": text, **fields})

    def end(self, status: str) -> dict[str, Any]:
        """Return the whole item."""
        item = self.whole("".join(self._pieces), status)
        self._tell("response.output_item.done", {"output_index": self._place["output_index"], "item": item})
        return item

    @abstractmethod
    def begun(self) -> dict[str, Any]:
        """Return the item without its text."""

    @abstractmethod
    def whole(self, text: str, status: str) -> dict[str, Any]:
        """Return the item with its text, and tell that the text has ended."""


class _PartItem(_Item):
    """An item whose text is the one part of its content."""

    done_event: str

    def start(self) -> None:
        self._place["content_index"] = 0
        super().start()
        self._tell("response.content_part.added", {**self._place, "part": self.part("")})

    def begun(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.kind, "status": "in_progress", "content": []}

    def whole(self, text: str, status: str) -> dict[str, Any]:
        part = self.part(text)
        # `annotations` stand in the part alone.
        ended = {key: value for key, value in part.items() if key in ("text", "logprobs")}
        self._tell(self.done_event, {**self._place, **ended})
        self._tell("response.content_part.done", {**self._place, "part": part})
        return {**self.begun(), "status": status, "content": [part]}

    @abstractmethod
    def part(self, text: str) -> dict[str, Any]:
        """Return the part, given its text so far."""


class MessageItem(_PartItem):
    """Text that the user sees."""

    kind, id_prefix = "message", "msg"
    delta_event, done_event = "response.output_text.delta", "response.output_text.done"

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._logprobs: list[dict[str, Any]] = []

    def write(self, text: str, **fields: Any) -> None:
        logprobs = fields["logprobs"] if self._pieces else _without_leading(fields["logprobs"], text)
        self._logprobs += logprobs
        super().write(text, logprobs=logprobs)

    def begun(self) -> dict[str, Any]:
        return {**super().begun(), "role": "assistant"}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


def _without_leading(logprobs: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the records of the tokens that wrote `text`, without those of marks and whitespace before it."""
    num_bytes, first = len(text.encode()), len(logprobs)
    while first and num_bytes > 0:
        first -= 1
        num_bytes -= len(logprobs[first]["bytes"])
    return logprobs[first:]


class ReasoningItem(_PartItem):
    """A thought."""

    kind, id_prefix = "reasoning", "rs"
    delta_event, done_event = "response.reasoning_text.delta", "response.reasoning_text.done"

    def __init__(self, *args: Any, has_encrypted: bool):
        super().__init__(*args)
        self._has_encrypted = has_encrypted

    def begun(self) -> dict[str, Any]:
        return {**super().begun(), "summary": [], "encrypted_content": None}

    def whole(self, text: str, status: str) -> dict[str, Any]:
        return {**super().whole(text, status), "encrypted_content": sealed(text) if self._has_encrypted else None}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class CallItem(_Item):
    """A call of a function or of a custom tool."""

    def __init__(self, *args: Any, name: str, namespace: str | None, is_custom: bool):
        if is_custom:
            self.kind, self.id_prefix, self._field = "custom_tool_call", "ctc", "input"
            self._event = "response.custom_tool_call_input"
        else:
            self.kind, self.id_prefix, self._field = "function_call", "fc", "arguments"
            self._event = "response.function_call_arguments"
        self.delta_event = f"{self._event}.delta"
        super().__init__(*args)
        self._named = {"call_id": call_id(self.id), "name": name} | ({"namespace": namespace} if namespace else {})

    def begun(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.kind, "status": "in_progress", **self._named, self._field: ""}

    def whole(self, text: str, status: str) -> dict[str, Any]:
        name = {"name": self._named["name"]} if self.kind == "function_call" else {}
        self._tell(f"{self._event}.done", {**self._place, **name, self._field: text})
        return {**self.begun(), "status": status, self._field: text}


class SearchItem(_Item):
    """A call of the client's tool search, whose arguments are an object, so that they come at once."""

    kind, id_prefix, delta_event = "tool_search_call", "tsc", ""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._call_id = call_id(self.id)

    def begun(self) -> dict[str, Any]:
        head = {"id": self.id, "type": self.kind, "status": "in_progress", "call_id": self._call_id}
        return {**head, "execution": "client", "arguments": {}}

    def whole(self, text: str, status: str) -> dict[str, Any]:
        return {**self.begun(), "status": status, "arguments": msgspec.Raw(text.encode())}


class OutputItems:
    """The output of one response, while its answer is read."""

    def __init__(self, response_id: str, details: ResponseDetails, tell: Tell):
        self.ended: list[dict[str, Any]] = []
        """The items that are whole, in order."""
        self._response_id, self._details, self._tell = response_id, details, tell
        self._open: _Item | None = None

    def read(self, events: Sequence[Event], logprobs: Sequence[dict[str, Any]] = ()) -> None:
        """Write the next events. `logprobs` are records of the tokens that wrote them, which a text tells of.

        A call that the end of the answer has cut stays open until `finish`.
        """
        for event in events:
            match event:
                case Content(text=text):
                    self._of(MessageItem).write(text, logprobs=list(logprobs))
                    logprobs = ()
                case Reasoning(text=text):
                    self._of(ReasoningItem, has_encrypted=self._details.has_encrypted).write(text)
                case CallStart():
                    self._start(self._call(event))
                case CallArguments(text=text):
                    assert self._open is not None, "a call has begun"
                    self._open.write(text)
                case CallEnd(is_cut=False):
                    self._end("completed")

    def finish(self, *, is_cut: bool) -> None:
        """End the output. Without any item it is an empty message.

        `is_cut` says that a limit has ended it, so that an item which is still open may not be whole.
        """
        if self._open is None and not self.ended:
            self._of(MessageItem)
        self._end("incomplete" if is_cut else "completed")

    def _of(self, kind: type[_Item], **options: Any) -> _Item:
        """Return the item that is open, if it is of this kind; otherwise a new one."""
        if type(self._open) is not kind:
            self._start(kind(self._tell, self._response_id, self._num_items, **options))
        assert self._open is not None
        return self._open

    @property
    def _num_items(self) -> int:
        return len(self.ended) + (self._open is not None)

    def _call(self, call: CallStart) -> _Item:
        """Return a new item for a call."""
        place = self._tell, self._response_id, self._num_items
        if call.name == SEARCH_NAME and self._details.has_search:
            return SearchItem(*place)
        namespace, name = self._details.names.get(call.name, (None, call.name))
        return CallItem(*place, name=name, namespace=namespace, is_custom=call.is_custom)

    def _start(self, item: _Item) -> None:
        self._end("completed")
        self._open = item
        item.start()

    def _end(self, status: str) -> None:
        if self._open is not None:
            item, self._open = self._open, None
            self.ended.append(item.end(status))
