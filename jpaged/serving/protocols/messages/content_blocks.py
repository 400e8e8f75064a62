"""An answer in Anthropic's words: the events of a stream that write its blocks, and the blocks themselves."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ....text.answers.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from ..call_ids import call_id

Record = dict[str, Any]


class BlockWriter:
    """Writes the blocks of one answer, one after the other, as the records of a stream's events."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self.num_calls = 0
        """Calls that have begun."""
        self._index = -1
        self._open: str | None = None
        """The type of the block that has not been stopped."""
        self._digest = hashlib.sha256()
        """SHA-256 of the text of the open thought so far."""

    def write(self, events: Iterable[Event]) -> Iterator[Record]:
        """Yield the records for events of the answer. The last block stays open."""
        for event in events:
            match event:
                case Content(text=text):
                    if self._open != "text":
                        yield from self._start({"type": "text", "text": ""})
                    yield self._delta("text_delta", "text", text)
                case Reasoning(text=text):
                    if self._open != "thinking":
                        yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
                        self._digest = hashlib.sha256()
                    self._digest.update(text.encode(errors="replace"))
                    yield self._delta("thinking_delta", "thinking", text)
                case CallStart(name=name):
                    self.num_calls += 1
                    id_ = call_id(self._response_id, self.num_calls, prefix="toolu_")
                    yield from self._start({"type": "tool_use", "id": id_, "name": name, "input": {}})
                case CallArguments(text=text):
                    yield self._delta("input_json_delta", "partial_json", text)
                case CallEnd():
                    yield from self.stop()

    def stop(self) -> Iterator[Record]:
        """Yield the records that end the open block, if there is one. A thought is signed: clients keep signed ones."""
        if self._open == "thinking":
            signature = base64.b64encode(self._digest.digest()).decode()
            yield self._delta("signature_delta", "signature", signature)
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _start(self, block: Record) -> Iterator[Record]:
        yield from self.stop()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, key: str, text: str) -> Record:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, key: text}}


def joined_blocks(records: Iterable[Record]) -> list[Record]:
    """Return the blocks that the records of a whole answer write. The input of a call is JSON as the model wrote it."""
    blocks: list[Record] = []
    pieces: dict[str, list[str]] = {}
    for record in records:
        if record["type"] == "content_block_start":
            blocks.append(dict(record["content_block"]))
            pieces = {}
        elif record["type"] == "content_block_delta":
            ((key, text),) = ((key, text) for key, text in record["delta"].items() if key != "type")
            pieces.setdefault(key, []).append(text)
        elif "partial_json" in pieces:
            blocks[-1]["input"] = msgspec.Raw("".join(pieces["partial_json"]).encode(errors="replace"))
        else:
            blocks[-1] |= {key: "".join(texts) for key, texts in pieces.items()}
    return blocks
