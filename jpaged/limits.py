"""Every limit on what requests may ask for and on what clients may send, in one table.

`EngineConfig.limits` sets them by these names. A limit that the rest of the code relies on, such as the size of an
array, can be lowered but not raised.
"""

from __future__ import annotations

from typing import NamedTuple

MIB = 1 << 20


class Limit(NamedTuple):
    """A bound on something that a request or a client sends, and what the bound itself may be."""

    engine_default: int | None
    """None: no limit."""
    server_default: int | None
    """Where clients are not trusted."""
    ceiling: int | None
    """The highest value that `limits` may give; None: any."""
    meaning: str
    floor: int = 1
    """The lowest value that `limits` may give."""


def _lowerable(value: int, meaning: str) -> Limit:
    """Return a limit that holds for every way in, and may only be lowered."""
    return Limit(value, value, value, meaning)


def _of_server(value: int | None, meaning: str, *, floor: int = 1) -> Limit:
    """Return a limit that a server alone has, and that may be raised."""
    return Limit(None, value, None, meaning, floor)


LIMITS: dict[str, Limit] = {
    # The queue.
    "waiting_requests": Limit(None, 2048, None, "requests that wait for their first step"),
    "waiting_tokens": Limit(None, 1 << 24, None, "prompt tokens of all requests that wait"),
    # What one request asks for.
    "samples": _lowerable(128, "samples or beams of a prompt"),
    "stop": _lowerable(16, "stop strings of a request"),
    "stop_chars": _lowerable(1024, "characters of a stop string"),
    "bad_words": _lowerable(128, "texts in bad_words"),
    "bad_word_tokens": _lowerable(1024, "tokens of all bad_words, each with and without a space before it"),
    "logit_bias": _lowerable(1024, "token ids in logit_bias"),
    "schema_bytes": _lowerable(64 * 1024, "bytes of a JSON schema, a grammar, or all choices together"),
    "tools": _lowerable(128, "tools of a request"),
    "regex_bytes": _lowerable(4 * 1024, "bytes of a regular expression"),
    "chars_per_token": _lowerable(64, "characters of a text for each token of the context, before it is tokenized"),
    "template_s": _lowerable(30, "seconds that a chat template may take"),
    "template_chars": _lowerable(8 * MIB, "characters that a chat template may make"),
    # What an HTTP client sends.
    "prompts": _of_server(1024, "prompts of one request"),
    "json_depth": _lowerable(64, "levels of objects and arrays in a body, or in a schema"),
    "json_values": _of_server(1 << 20, "commas, colons and opening brackets in a body: about the number of its values"),
    "body_bytes": _of_server(32 * MIB, "bytes of a request's body"),
    "pending_bytes": _of_server(512 * MIB, "bytes of all bodies together that have not been parsed yet"),
    "body_s": _of_server(60, "seconds until a request's body has arrived"),
    "header_bytes": _of_server(16 * 1024, "bytes of a request's line and headers"),
    "headers": _of_server(100, "headers of a request"),
    "header_s": _of_server(10, "seconds until a request's headers have arrived"),
    "keep_alive_s": _of_server(75, "seconds that a connection without a request stays open"),
    "silence_s": _of_server(
        15, "seconds without an event after which a stream sends a comment; 0: no comments", floor=0
    ),
    "send_s": _of_server(60, "seconds that a client may take nothing of its response before its connection is closed"),
    "connections": _of_server(4096, "open connections"),
    "requests_per_key": _of_server(None, "unfinished requests of one key, or of all clients of a server without keys"),
    "request_s": _of_server(None, "seconds until a request has ended, the time in the queue included"),
}
DEFAULT_LIMITS = {name: limit.engine_default for name, limit in LIMITS.items()}
"""The limits of an engine that is given none."""


def ceiling(name: str) -> int:
    """Return the value that a limit cannot exceed, for code that relies on it."""
    value = LIMITS[name].ceiling
    assert value is not None, "a limit without a ceiling"
    return value
