"""The table of all protocols: a new one is a sub-package beside this module, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .chat.protocol import CHAT_COMPLETIONS
from .completions.protocol import COMPLETIONS
from .messages.protocol import MESSAGES
from .protocol import Headers, Protocol
from .request_parser import RequestParser
from .responses.protocol import RESPONSES
from .tokens.protocol import TOKENS

PROTOCOLS: tuple[Protocol, ...] = (COMPLETIONS, CHAT_COMPLETIONS, RESPONSES, MESSAGES, TOKENS)
GENERATION_ROUTES = {path: route for one in PROTOCOLS for path, route in one.generation_routes.items()}
PARSER_ROUTES = {path: parse for one in PROTOCOLS for path, parse in one.parser_routes.items()}
METHODS: dict[str, Callable[[RequestParser, bytearray], Any]] = {
    method.__name__: method
    for method in (*(route.parse for route in GENERATION_ROUTES.values()), *PARSER_ROUTES.values())
}
"""Everything that can be done with a body, by the name of the function that does it."""


def protocol_of(path: str, headers: Headers) -> Protocol:
    """Return the protocol that the client of a request speaks.

    The path tells it; at a path of no protocol, the header that the clients of one send; otherwise it is OpenAI's.
    """
    for protocol in PROTOCOLS:
        if protocol.has_path(path):
            return protocol
    return next((protocol for protocol in PROTOCOLS if protocol.is_spoken_by(headers)), COMPLETIONS)
