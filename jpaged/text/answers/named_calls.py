"""Reads a call that is a name and JSON behind it."""

from __future__ import annotations

from .answer_writer import AnswerWriter, Call
from .cursor import Chars, Cursor, Literals, Reader
from .formats import NamedCalls
from .json_text import JsonText, read_json

_NAME_CHARS = Chars(r'^\[\]{}()<>"\s\ud800-\udfff')
_ID_CHARS = Chars(r"A-Za-z0-9_-")


def read_named_call(cursor: Cursor, writer: AnswerWriter, body: NamedCalls) -> Reader[bool]:
    """Read a call; return whether it was announced, so that what follows up to the end mark belongs to it.

    The cursor keeps a record from the mark before the call on. What is no call becomes content.
    """
    call = Call(writer)
    is_complete = False
    out = JsonText(call.write)
    if (yield from _read_name(cursor, body, call)):
        is_complete = yield from read_json(cursor, out, writer.mark_texts, body.dialect)
    if not call.is_announced:
        writer.content.write(cursor.recorded())
        return False
    lost = "" if is_complete else "".join(out.held)
    out.close()
    call.end()
    if lost and (yield from cursor.peek()):
        writer.content.write(lost)
    return True


def _read_name(cursor: Cursor, body: NamedCalls, call: Call) -> Reader[bool]:
    """Read what stands before the arguments, and announce the call; return whether its arguments follow."""
    yield from cursor.skip_whitespace()
    if body.before_name and not (yield from _take(cursor, body.before_name)):
        return False
    pieces: list[str] = []
    yield from cursor.take(_NAME_CHARS, pieces.append)
    yield from cursor.skip_whitespace()
    if body.before_id and (yield from _take(cursor, body.before_id)):
        yield from cursor.take(_ID_CHARS)
    is_certain = bool(body.before_arguments) and (yield from _take(cursor, body.before_arguments))
    yield from cursor.skip_whitespace()
    has_arguments = (yield from cursor.peek()) == "{"
    if (is_certain or has_arguments) and call.announce("".join(pieces)):
        cursor.forget()
    return has_arguments


def _take(cursor: Cursor, text: str) -> Reader[bool]:
    """Take `text` if it comes next; return whether it does."""
    found = yield from cursor.begins(Literals([text]))
    cursor.place += len(found)
    return bool(found)
