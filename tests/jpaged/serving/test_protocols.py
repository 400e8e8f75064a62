"""What routes tell in the words of each protocol: keys, errors, models."""

import json
from typing import Any

import openai
import pytest

from jpaged.errors import InvalidRequestError
from jpaged.serving.protocols.http_errors import HTTPError
from jpaged.serving.protocols.messages.errors import error_body as anthropic_error
from jpaged.serving.protocols.messages.models import anthropic_models
from jpaged.serving.protocols.served_model import ServedModel
from jpaged.serving.protocols.table import PROTOCOLS

from .conftest import KEYS
from .served import Served
from .test_http import statuses

KEY_HEADERS: dict[str, tuple[list[str], int]] = {
    "bearer": (["Authorization: Bearer first-key"], 200),
    "x-api-key": (["x-api-key: first-key"], 200),
    "both, equal": (["Authorization: Bearer second-key", "x-api-key: second-key"], 200),
    "both, two keys": (["Authorization: Bearer first-key", "x-api-key: second-key"], 401),
    "one of them wrong": (["x-api-key: wrong", "Authorization: Bearer first-key"], 401),
    "x-api-key is wrong": (["x-api-key: wrong"], 401),
    "x-api-key is empty": (["x-api-key: "], 401),
    "x-api-key twice": (["x-api-key: first-key", "x-api-key: first-key"], 401),
    "a scheme": (["x-api-key: Bearer first-key"], 401),
    "basic": (["Authorization: Basic first-key", "x-api-key: first-key"], 401),
}


@pytest.mark.parametrize("case", KEY_HEADERS)
def test_a_key_is_taken_from_the_header_of_either_protocol(locked: Served, case: str):
    headers, status = KEY_HEADERS[case]
    lines = ["GET /v1/models HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    assert statuses(locked.raw("\r\n".join(lines).encode())) == [status]


UNREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "no key": (401, {"headers": {"authorization": ""}}),
    "another method": (405, {"method": "PUT"}),
    "no JSON": (415, {"headers": {"content-type": "text/plain"}}),
    "too long a body": (413, {"body": b" " * 2001}),
}
"""What is refused before a body is read."""
GENERATING = {path: protocol for protocol in PROTOCOLS for path in protocol.generation_routes}


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("case", UNREAD)
def test_what_is_refused_unread_has_the_form_of_the_protocol_of_its_path(locked: Served, path: str, case: str):
    status, sent = UNREAD[case]
    found, headers, body = locked.request(path, **{"body": {}, **sent})
    message = body["error"]["message"]
    error = HTTPError(status, message, code="invalid_api_key" if status == 401 else None)
    assert (found, body) == (status, json.loads(GENERATING[path].error_body(error, headers["x-request-id"])))


RAISED: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str | None]] = {
    "a wrong key": ({"extra_headers": {"Authorization": "Bearer wrong"}}, openai.AuthenticationError, None),
    "an unknown model": ({"model": "other"}, openai.NotFoundError, "model"),
    "a wrong value": ({"temperature": 5}, openai.BadRequestError, "temperature"),
    "too long a body": ({"user": "x" * 2000}, openai.APIStatusError, None),
    "a tool twice": (
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, openai.BadRequestError,
        "tools[1].function.name",
    ),
    "a choice without tools": ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice"),
    "a budget below 0": ({"extra_body": {"thinking_token_budget": -1}}, openai.BadRequestError,
                         "thinking_token_budget"),
    "documents": ({"extra_body": {"documents": [{"text": "x"}]}}, openai.BadRequestError, "documents"),
    "a result without its call": (
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "tool", "tool_call_id": "x", "content": "y"}]},
        openai.BadRequestError, "messages[1]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RAISED)
@pytest.mark.parametrize("is_stream", [False, True], ids=["complete", "stream"])
def test_openais_client_raises_its_own_exceptions(locked: Served, case: str, is_stream: bool):
    """Also of a stream, which has not begun then; and the next request is none the worse."""
    fields, kind, param = RAISED[case]
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEYS[0], max_retries=0)
    good: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**good, **fields}, stream=is_stream)
    assert caught.value.param == param
    assert client.chat.completions.create(**good).usage.completion_tokens == 2


KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


@pytest.mark.parametrize("status", KINDS)
def test_an_error_of_messages_is_anthropics(status: int):
    error = HTTPError(status, "a  message\n\ud800", param="max_tokens")
    assert json.loads(anthropic_error(error, "req-5")) == {
        "type": "error", "error": {"type": KINDS[status], "message": "a message ?"}, "request_id": "req-5"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "sent", "kind"),
    [
        ("/v1/messages", {"headers": {"authorization": ""}}, "authentication_error"),
        ("/v1/messages", {"method": "PUT"}, "invalid_request_error"),
        ("/v1/messages/nothing", {}, "not_found_error"),
        ("/v1/models/nothing", {"method": "GET", "headers": {"anthropic-version": "2023-06-01"}}, "not_found_error"),
        ("/nothing", {"headers": {"anthropic-version": "2023-06-01"}}, "not_found_error"),
    ],
)
def test_clients_of_anthropic_get_their_errors_at_every_path(
    locked: Served, path: str, sent: dict[str, Any], kind: str
):
    _, headers, body = locked.request(path, **{"body": {}, **sent})
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == headers["request-id"] == headers["x-request-id"]


@pytest.mark.parametrize(("path", "key"), [("/v1/messages", "request_id"), ("/v1/completions", "error")])
def test_a_body_that_does_not_come_in_time_is_told_in_the_form_of_its_path(locked: Served, path: str, key: str):
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 10"]
    data = locked.raw("\r\n".join([*lines, f"Authorization: Bearer {KEYS[0]}", "", "{"]).encode())
    assert statuses(data) == [408]
    body = json.loads(data.partition(b"\r\n\r\n")[2])
    assert key in body
    assert (body.get("type") == "error") is (path == "/v1/messages")


def test_paths_that_only_begin_like_those_of_a_protocol_are_none_of_it(locked: Served):
    for path in ("/v1/messagesx", "/v1/message", "/nothing"):
        assert "code" in locked.request(path, {})[2]["error"]


def test_models_are_told_in_the_words_of_the_client(locked: Served):
    version = {"anthropic-version": "2023-06-01"}
    assert locked.request("/v1/models")[2]["data"][0]["object"] == "model"
    _, _, listed = locked.request("/v1/models?limit=5", headers=version)
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "tiny")
    (model,) = listed["data"]
    assert (model["type"], model["id"], model["max_input_tokens"]) == ("model", "tiny", 128)
    assert locked.request("/v1/models/tiny", headers=version)[2] == model
    assert locked.request("/v1/models?limit=0", headers=version)[0] == 400


def test_codex_finds_an_entry_for_each_model(locked: Served):
    """With all fields without which it refuses the list."""
    (entry,) = locked.request("/v1/models")[2]["models"]
    required = {
        "slug", "display_name", "supported_reasoning_levels", "shell_type", "visibility", "supported_in_api",
        "priority", "support_verbosity", "truncation_policy", "experimental_supported_tools", "base_instructions",
    }  # fmt: skip
    assert required <= entry.keys()
    assert (entry["slug"], entry["context_window"], entry["truncation_policy"]["limit"]) == ("tiny", 128, 32)


def test_pages_of_models_follow_one_another():
    models = [ServedModel(name=name, created=0, root="", max_model_len=5) for name in "abcde"]

    def page(**query: str) -> tuple[str, bool]:
        found = anthropic_models(models, query)
        names = "".join(one["id"] for one in found["data"])
        assert (found["first_id"], found["last_id"]) == ((names[0], names[-1]) if names else (None, None))
        return names, found["has_more"]

    assert page() == ("abcde", False)
    assert page(limit="2") == ("ab", True)
    assert page(limit="2", after_id="b") == ("cd", True)
    assert page(limit="2", after_id="d") == ("e", False)
    assert page(after_id="e") == ("", False)
    assert page(limit="2", before_id="e") == ("cd", True)
    assert page(limit="2", before_id="c") == ("ab", False)
    for query in (
        {"limit": "0"},
        {"limit": "x"},
        {"after_id": "x"},
        {"page": "2"},
        {"after_id": "a", "before_id": "b"},
    ):
        with pytest.raises(InvalidRequestError):
            anthropic_models(models, query)
