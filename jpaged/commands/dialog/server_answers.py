"""Answers of a server that speaks OpenAI's /v1/chat/completions: jpaged's, vLLM's, llama.cpp's, OpenAI's own."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from ...checks import one_line, refusal, shown
from ...errors import ConfigError
from .answers import AnswerError, AnswerPart, Message

SILENCE_S = 600.0
"""Seconds without a byte after which a server is given up; OpenAI's clients have the same."""
MAX_ERROR_BYTES = 1 << 16
"""Bytes of an error's body that are read."""
FULL = ("context_length_exceeded", "exceed_context_size_error")
"""OpenAI's `code` and llama.cpp's `type` of the error for a conversation that exceeds the model's context."""


class _NoRedirects(HTTPRedirectHandler):
    """Refuses to follow a server elsewhere, which would take the key along."""

    def redirect_request(self, *args: Any) -> None:
        return None


class ServerAnswers:
    """A model behind a server's URL."""

    may_be_interrupted = True
    keeps_thoughts = False  # Not every server takes the field, and those that think need none of earlier turns.

    def __init__(self, base_url: str, *, key: str | None, model: str | None, params: Mapping[str, Any]):
        """`base_url` is that of `checked_url`. `params` go into each request. `model` None: the one that is served.

        Raise ConfigError if the server cannot be asked for its models, or has none or several.
        """
        self.url, self._key, self._params = base_url, key, params
        self._opener = build_opener(_NoRedirects)
        self.model = self._only_model() if model is None else model

    def parts(self, messages: Sequence[Message]) -> Generator[AnswerPart, None, None]:
        body = {"model": self.model, "messages": messages, "stream": True, **self._params}
        is_finished = False
        with self._response("/chat/completions", body) as response:
            for event in _events(response):
                for part in _parts_of(event):
                    is_finished |= part.finish_reason is not None
                    yield part
        if not is_finished:
            raise AnswerError("the server has ended the connection before the answer")

    def _only_model(self) -> str:
        """Return the name of the one model that the server has."""
        try:
            with self._response("/models") as response:
                listed = _decoded(response.read())
            names = [str(one["id"]) for one in listed["data"]]
        except AnswerError as error:
            raise ConfigError(f"--url: {self.url}/models: {error}") from error
        except (LookupError, TypeError) as error:
            raise ConfigError(f"--url: {self.url}/models is no list of models; name one by --model") from error
        if len(names) != 1:
            got = one_line(", ".join(names), 300) or "none"
            raise refusal("--model", f"none, and the server has {got}", "one of them", error=ConfigError)
        return names[0]

    @contextmanager
    def _response(self, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """Give the response to a request, POST if it has a body, and close its connection at the end.

        Raise AnswerError for a server that cannot be reached, refuses the request or breaks off.
        """
        headers = {"Accept": "text/event-stream, application/json", "User-Agent": "jpaged-chat"}
        headers |= {"Content-Type": "application/json"} if body is not None else {}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._opener.open(Request(self.url + path, data, headers), timeout=SILENCE_S) as response:
                yield response
        except HTTPError as error:
            with error:
                raise _refused(error.code, error.read(MAX_ERROR_BYTES)) from None
        except TimeoutError as error:
            raise AnswerError(f"the server has been silent for {SILENCE_S:g} s") from error
        except URLError as error:
            raise AnswerError(f"the server cannot be reached ({one_line(error.reason)})") from error
        except (OSError, http.client.HTTPException) as error:
            reason = one_line(error) or type(error).__name__
            raise AnswerError(f"the connection to the server has ended ({reason})") from error


def checked_url(url: str) -> str:
    """Return the base URL of a server's routes: as given, with the path /v1 if it has none. Raise ConfigError."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # A port that is no number, or an unclosed bracket.
        parts, has_host = urlsplit(""), False
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not has_host or not is_plain:
        raise refusal("--url", shown(url), "http://HOST:PORT or https://HOST, perhaps with a path", error=ConfigError)
    if parts.username is not None or parts.query or parts.fragment:
        way_out = "give the key by --api-key-file or OPENAI_API_KEY"
        raise refusal("--url", "one with a user, ? or #", "scheme, host, port and path", way_out, error=ConfigError)
    return parts._replace(path=parts.path.rstrip("/") or "/v1").geturl()


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """Yield the JSON of each event of a stream; a response that is no stream is one event."""
    if response.headers.get_content_type() == "application/json":
        yield _decoded(response.read())
        return
    for line in response:
        if line.startswith(b"data:"):  # Others are empty, comments, or fields that tell nothing of the answer.
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            yield _decoded(data)


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"the server has sent what is no JSON ({one_line(error, 100)})") from error


def _parts_of(event: Any) -> Iterator[AnswerPart]:
    """Yield the parts in one event, or in a whole response. Raise AnswerError for one that tells an error."""
    if isinstance(event, dict) and event.get("error"):
        raise _failed(event)
    try:
        for choice in event.get("choices") or ():
            said = choice.get("delta") or choice.get("message") or {}
            if thought := said.get("reasoning_content") or said.get("reasoning"):
                yield AnswerPart(str(thought), is_thought=True)
            if text := said.get("content") or said.get("refusal"):
                yield AnswerPart(str(text))
            if choice.get("finish_reason"):
                yield AnswerPart(finish_reason=str(choice["finish_reason"]))
    except (AttributeError, TypeError) as error:
        raise AnswerError("the server has sent an event that is no part of a chat completion") from error


def _refused(status: int, body: bytes) -> AnswerError:
    """Return the error for a response with the status of one."""
    try:
        found = _failed(json.loads(body))
    except (ValueError, RecursionError):
        found = AnswerError(one_line(body.decode(errors="replace"), 200) or "no body")
    way_out = "; give the key by --api-key-file or OPENAI_API_KEY" if status in (401, 403) else ""
    return AnswerError(f"the server answers {status}: {found}{way_out}", is_full=found.is_full)


def _failed(told: Any) -> AnswerError:
    """Return the error that a body or an event tells, in the words of OpenAI's interface or of FastAPI's."""
    told = told if isinstance(told, dict) else {"error": told}
    error = told.get("error") or told.get("detail") or told.get("message") or told
    message = error
    words: tuple[Any, ...] = ()
    if isinstance(error, dict):
        message, words = error.get("message") or error, (error.get("code"), error.get("type"))
    # Others have the words of OpenAI's message, and not its code.
    is_full = any(word in FULL for word in words) or "maximum context length" in str(message)
    return AnswerError(one_line(message, 1000), is_full=is_full)
