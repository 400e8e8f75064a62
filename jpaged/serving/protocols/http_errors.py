"""The server's errors, whose text is short and quotes no prompt. Each protocol writes them in a form of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...checks import one_line
from ...errors import ConfigError, EngineStoppedError, InvalidRequestError, QueueFullError

logger = logging.getLogger("jpaged")

MAX_MESSAGE_CHARS = 1000
CLIENT_GONE = 499
"""Status of a request whose client is not there to read it; traces tell of it."""
RETRY_AFTER_S = 1
"""Seconds after which a client may try again, where nothing better is known."""
ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "ContentTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    CLIENT_GONE: "ClientLeftError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
"""The field `type` of an error by its status; the names are those of the exceptions of OpenAI's package where it has
one."""


class HTTPError(Exception):
    """A response that tells an error, or the last event of a stream that has failed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """`code` is OpenAI's word for the kind of error, by which programs recognize it; None for most kinds."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


def unavailable(message: str, *, retry_after_s: int = RETRY_AFTER_S) -> HTTPError:
    """Return a 503 that a client may try again."""
    return HTTPError(503, message, headers={"retry-after": str(retry_after_s)})


def unknown_model(message: str) -> HTTPError:
    """Return a 404 for the name of no model that is served."""
    return HTTPError(404, message, param="model", code="model_not_found")


def http_error(error: Exception) -> HTTPError:
    """Return the error that a client gets for a request which raised an exception.

    An exception that is a defect is logged, and not described.
    """
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, QueueFullError):
        return unavailable(f"the server is busy: {error.limit} is {error.allowed}, all of it in use; try again later")
    if isinstance(error, InvalidRequestError):
        return HTTPError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, ConfigError):  # Of an argument of an admin route.
        return HTTPError(400, str(error), param=error.param)
    if isinstance(error, EngineStoppedError):
        return unavailable("the engine has stopped", retry_after_s=10)
    logger.error("a request failed in the server: %s: %s", type(error).__name__, one_line(error), exc_info=error)
    return HTTPError(500, "internal error; the server's log tells more")


def error_summary(error: HTTPError) -> str:
    """Return the kind of an error and its field, for a trace: "BadRequestError: temperature"."""
    kind = error.code or ERROR_TYPES.get(error.status, "APIError")
    return kind if error.param is None else f"{kind}: {error.param[:100]}"


def short_message(error: HTTPError) -> str:
    """Return the message of an error on one line, at most MAX_MESSAGE_CHARS long, as JSON in UTF-8 can hold it."""
    message = " ".join(error.message.split())
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 1] + "…"
    return valid_text(message)


def valid_text(text: str) -> str:
    """Return a text without lone surrogates, which no JSON in UTF-8 can hold."""
    return text.encode(errors="replace").decode()
