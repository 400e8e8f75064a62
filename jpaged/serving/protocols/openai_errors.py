"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from ...json_lines import encode_json
from .http_errors import ERROR_TYPES, HTTPError, short_message, valid_text


def error_record(error: HTTPError) -> dict[str, Any]:
    """Return the `error` object of a response or of a stream's event."""
    kind = ERROR_TYPES.get(error.status, "APIError")
    param = None if error.param is None else valid_text(error.param[:100])
    return {"message": short_message(error), "type": kind, "param": param, "code": error.code}


def error_body(error: HTTPError, request_id: str = "") -> bytes:
    """Return the JSON body of an error, which has no place for the request's id."""
    return encode_json({"error": error_record(error)})
