"""Every limit on what requests may ask for and on what clients may send, in one table.

`EngineConfig.limits` sets them by these names. A limit that the rest of the code relies on, such as the size of an
array, can be lowered but not raised.
"""

from __future__ import annotations

from typing import NamedTuple

MIB = 1 << 20


class Limit(NamedTuple):
    """One limit: the largest value that is taken."""

    default: int | None
    """None: no limit."""
    served: int | None
    """The default of a server, whose clients are not trusted."""
    largest: int | None
    """The highest value that `limits` may give; None: any."""
    meaning: str


def _fixed(value: int, meaning: str) -> Limit:
    """Return a limit that holds for every way in, and may only be lowered."""
    return Limit(value, value, value, meaning)


def _of_server(value: int | None, meaning: str) -> Limit:
    """Return a limit that a server alone has, and that may be raised."""
    return Limit(value, value, None, meaning)


LIMITS: dict[str, Limit] = {
    # The queue.
    "waiting_requests": Limit(None, 2048, None, "requests that wait for their first step"),
    "waiting_tokens": Limit(None, 1 << 24, None, "prompt tokens of all requests that wait"),
    # What one request asks for.
    "samples": _fixed(128, "samples or beams of a prompt"),
    "stop": _fixed(16, "stop strings of a request"),
    "stop_chars": _fixed(1024, "characters of a stop string"),
    "bad_words": _fixed(128, "texts in bad_words"),
    "bad_word_tokens": _fixed(1024, "tokens of all bad_words, each with and without a space before it"),
    "logit_bias": _fixed(1024, "token ids in logit_bias"),
    "schema_bytes": _fixed(64 * 1024, "bytes of a JSON schema, a grammar, or all choices together"),
    "regex_bytes": _fixed(4 * 1024, "bytes of a regular expression"),
    "chars_per_token": _fixed(64, "characters of a text for each token of the context, before it is tokenized"),
    "template_s": _fixed(30, "seconds that a chat template may take"),
    "template_chars": _fixed(8 * MIB, "characters that a chat template may make"),
    # What an HTTP client sends.
    "prompts": _of_server(1024, "prompts of one request"),
    "json_depth": _fixed(64, "levels of objects and arrays in a body"),
    "body_bytes": _of_server(32 * MIB, "bytes of a request's body"),
    "body_s": _of_server(60, "seconds until a request's body has arrived"),
    "header_bytes": _of_server(16 * 1024, "bytes of a request's line and headers"),
    "headers": _of_server(100, "headers of a request"),
    "header_s": _of_server(10, "seconds until a request's headers have arrived"),
    "keep_alive_s": _of_server(5, "seconds that a connection without a request stays open"),
    "connections": _of_server(4096, "open connections"),
    "requests_per_key": _of_server(None, "unfinished requests of one key, or of all clients of a server without keys"),
    "request_s": _of_server(None, "seconds until a request has ended, the time in the queue included"),
}
DEFAULT_LIMITS = {name: limit.default for name, limit in LIMITS.items()}
"""The limits of an engine that is given none."""


def largest(name: str) -> int:
    """Return the value that a limit cannot exceed, for code that relies on it."""
    value = LIMITS[name].largest
    assert value is not None, "a limit without a bound"
    return value
