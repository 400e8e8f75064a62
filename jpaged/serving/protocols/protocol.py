"""What the routes of the server know of a protocol: one record for each, in the table PROTOCOLS of `table`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .codex_models import openai_models
from .encoder import Encoder
from .generation_request import GenerationRequest
from .http_errors import HTTPError
from .openai_errors import error_body
from .request_parser import ParserResponse, RequestParser
from .served_model import ServedModel, openai_model

Headers = Sequence[tuple[bytes, bytes]]
"""Headers of a request as ASGI has them: names in lower case, and values."""


class GenerationRoute(NamedTuple):
    """How the requests of one path that generates are read, and how their responses are written."""

    parse: Callable[[RequestParser, bytearray], GenerationRequest]
    """Makes a request of a body. Raises HTTPError or InvalidRequestError."""
    encoder_type: type[Encoder]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """One protocol: its paths, and the forms of what is told at them."""

    path: str
    """Errors at this path, and below it, have the form of the protocol."""
    generation_routes: Mapping[str, GenerationRoute] = field(default_factory=dict)
    """Paths that generate."""
    parser_routes: Mapping[str, Callable[[RequestParser, bytearray], ParserResponse]] = field(default_factory=dict)
    """Paths whose response the parser alone makes of a body."""
    error_body: Callable[[HTTPError, str], bytes] = error_body
    """Writes an error as the body of a response, given the id of its request."""
    id_header: str | None = None
    """The header by which its clients read the request's id, beside `x-request-id`."""
    version_header: bytes | None = None
    """A header that all its clients send, which tells them apart at paths that protocols share; None: they send no such
    header."""
    model: Callable[[ServedModel], dict[str, Any]] = openai_model
    """Writes one model of /v1/models."""
    models: Callable[[Sequence[ServedModel], Mapping[str, str]], dict[str, Any]] = openai_models
    """Writes the list of models, given the query of its request."""

    def has_path(self, path: str) -> bool:
        """Return whether a path is the protocol's, also one that no route has."""
        return path == self.path or path.startswith(f"{self.path}/")

    def is_spoken_by(self, headers: Headers) -> bool:
        """Return whether the headers of a request say that its client speaks this protocol."""
        return any(name == self.version_header for name, _ in headers)
