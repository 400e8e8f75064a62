"""Errors in Anthropic's form: `{"type": "error", "error": {"type", "message"}, "request_id"}`.

The error about a stored thread has `details` too. By them Anthropic's package sees that it has to send the whole
conversation; its `tool_runner` asks for a thread first.
"""

from __future__ import annotations

from typing import Any

from ....json_lines import encode_json
from ..http_errors import HTTPError, short_message

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's word for the kind of an error, by its status; other errors of clients are `invalid_request_error`, and of
the server `api_error`."""


NO_THREADS = "thread_unsupported_request"
"""The code of an error that refuses to store a conversation."""


def error_record(error: HTTPError, request_id: str) -> dict[str, Any]:
    """Return the object that tells an error, as a response's body and as the data of a stream's event `error`."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ERROR_TYPES.get(error.status, other)
    told: dict[str, Any] = {"type": kind, "message": short_message(error)}
    if error.code == NO_THREADS:
        told["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    return {"type": "error", "error": told, "request_id": request_id}


def error_body(error: HTTPError, request_id: str) -> bytes:
    """Return the JSON body of an error."""
    return encode_json(error_record(error, request_id))
