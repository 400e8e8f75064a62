"""Every kind of bad input gets its one clear error, quotes nothing long, and harms nobody (RELIABILITY, table 4.1)."""

import json
import re
import threading
from typing import Any

import pytest

from .conftest import FLAGS
from .served import Served, serving

MARK = "wild-badger"
"""Part of what is sent, at places whose text no error may repeat."""
LONG = MARK + "x" * 5000
USER = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "max_tokens": 2, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hi", "max_tokens": 2, **fields}


BODIES: dict[str, bytes] = {
    "not JSON": b"hello",
    "nothing": b"",
    "an array": b"[1]",
    "a number": b"5",
    "NUL": b'{"prompt": "a\0b"}',
    "an escaped NUL": b'{"model": "tiny", "prompt": "a\\u0000b"}',
    "nested too deep": b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    "nested a million deep": b'{"prompt": ' + b"[" * 1_000_000,
    "a key twice": b'{"model": "tiny", "model": "tiny", "prompt": "a"}',
    "a key twice inside": b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "top_p": -Infinity}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "a lone surrogate as a key": b'{"prompt": "a", "\\udc00": 1}',
    "digits without end": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "half": b'{"prompt": "a"',
    "two": b'{"prompt": "a"}{"prompt": "b"}',
}
FIELDS: dict[str, tuple[str, dict[str, Any], str]] = {
    f"{name} {index}": (route, body, param)
    for name, (route, bodies, param) in {
        "prompt": ("completions", [{"model": "tiny"}, text(prompt=""), text(prompt=[]), text(prompt=[[]]),
                   text(prompt=[""]), text(prompt=5), text(prompt={}), text(prompt=[5, "a"]), text(prompt=["a", [5]]),
                   text(prompt=[-1]), text(prompt=[258]), text(prompt=[2**31]), text(prompt=[2**63]),
                   text(prompt=[True]), text(prompt=[1.0]), text(prompt=[[1], [2.5]]), text(prompt=[None]),
                   text(prompt=[[[1]]]), text(prompt=["a"] * 1025)], "prompt"),
        "messages": ("chat/completions", [chat(messages=[]), chat(messages="hi"), chat(messages=[{}]),
                     chat(messages=[{"content": "a"}]), chat(messages=[{"role": "user", "content": None}]),
                     chat(messages=[{"role": "user"}]), chat(messages=[{"role": "king", "content": "a"}]),
                     chat(messages=[["user", "a"]]), chat(messages=[{"role": "user", "content": 5}]),
                     chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
                     {"model": "tiny"}], "messages"),
        "max_tokens": ("completions", [text(max_tokens=one) for one in (0, -1, 1e30, "5", 2.5, True)], "max_tokens"),
        "max_completion_tokens": ("chat/completions", [chat(max_completion_tokens=5)], "max_tokens"),
        "temperature": ("completions", [text(temperature=one) for one in (-0.1, 2.1, "1", True, [1])], "temperature"),
        "top_p": ("completions", [text(top_p=one) for one in (1.1, -1, "x")], "top_p"),
        "min_p": ("completions", [text(min_p=one) for one in (-0.1, 1.1)], "min_p"),
        "top_k": ("completions", [text(top_k=one) for one in (-2, 1.5, "3")], "top_k"),
        "presence_penalty": ("completions", [text(presence_penalty=one) for one in (-2.1, 2.1)], "presence_penalty"),
        "frequency_penalty": ("completions", [text(frequency_penalty=one) for one in (-2.1, 3)], "frequency_penalty"),
        "repetition_penalty": ("completions", [text(repetition_penalty=one) for one in (0, -1)], "repetition_penalty"),
        "n": ("completions", [text(n=one) for one in (0, 10**9, 129, "2", 1.5)], "n"),
        "best_of": ("completions", [text(best_of=2)], "best_of"),
        "logprobs": ("completions", [text(logprobs=one) for one in (21, -1, -2, True, "1")], "logprobs"),
        "top_logprobs": ("chat/completions", [chat(top_logprobs=2), chat(top_logprobs=2, logprobs=False)],
                         "top_logprobs"),
        "many top_logprobs": ("chat/completions", [chat(logprobs=True, top_logprobs=21)], "top_logprobs"),
        "chat logprobs": ("chat/completions", [chat(logprobs=1)], "logprobs"),
        "prompt_logprobs": ("completions", [text(prompt_logprobs=1, stream=True), text(prompt_logprobs=21)],
                            "prompt_logprobs"),
        "logit_bias": ("completions", [text(logit_bias={"abc": 1}), text(logit_bias={"258": 1}),
                       text(logit_bias={"1": 1e9}), text(logit_bias={"1": "x"}), text(logit_bias=[1]),
                       text(logit_bias={str(one): 1 for one in range(1025)})], "logit_bias"),
        "stop_token_ids": ("completions", [text(stop_token_ids=[258]), text(stop_token_ids=[-1]),
                           text(stop_token_ids="5")], "stop_token_ids"),
        "allowed_token_ids": ("completions", [text(allowed_token_ids=[]), text(allowed_token_ids=[300])],
                              "allowed_token_ids"),
        "bad_words": ("completions", [text(bad_words=[""]), text(bad_words=["a"] * 129), text(bad_words="a")],
                      "bad_words"),
        "stop": ("completions", [text(stop=["a"] * 17), text(stop=""), text(stop=["a" * 1025]), text(stop=[5]),
                 text(stop=["x" * 1_000_000])], "stop"),
        "seed": ("completions", [text(seed=2**63), text(seed=-(2**63) - 1), text(seed="x"), text(seed=1.5)], "seed"),
        "min_tokens": ("completions", [text(min_tokens=3), text(min_tokens=-1)], "min_tokens"),
        "response_format": ("chat/completions", [chat(response_format=5), chat(response_format={}),
                            chat(response_format={"type": "json_schema"}), chat(response_format={"type": "xml"}),
                            chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "oops"}}}),
                            chat(response_format={"type": "json_schema",
                                                  "json_schema": {"schema": {"$ref": "http://x/y"}}})], None),
        "structured_outputs": ("completions", [text(structured_outputs={"regex": "("}),
                               text(structured_outputs={"grammar": "root ::= ("}), text(structured_outputs={}),
                               text(structured_outputs={"regex": "a" * 4097})], None),
        "chat_template": ("chat/completions", [chat(chat_template="{{ 1 }}")], "chat_template"),
        "chat_template_kwargs": ("chat/completions", [chat(chat_template_kwargs=5)], "chat_template_kwargs"),
        "tools": ("chat/completions", [chat(tools=[{"type": "function"}])], "tools"),
        "cache_salt": ("completions", [text(cache_salt=one) for one in ("", 5, "x" * 257, "a\nb")], "cache_salt"),
        "priority": ("completions", [text(priority=5), text(priority="x")], "priority"),
        "stream_options": ("completions", [text(stream_options={"include_usage": True}),
                           text(stream=True, stream_options=5), text(stream=True, stream_options={"x": True})], None),
        "stream": ("completions", [text(stream="yes"), text(stream=1)], "stream"),
        "echo": ("completions", [text(echo="yes")], "echo"),
        "suffix": ("completions", [text(suffix="x")], "suffix"),
        "truncate": ("completions", [text(truncate_prompt_tokens=-2), text(truncate_prompt_tokens="5")],
                     "truncate_prompt_tokens"),
        "request_id": ("completions", [text(request_id=""), text(request_id="x" * 129)], "request_id"),
        "model": ("completions", [text(model=5), text(model=["tiny"])], "model"),
    }.items()
    for index, body in enumerate(bodies)
}  # fmt: skip


def check_error(reply: tuple[int, dict[str, str], Any], status: int, code: str | None = None) -> dict[str, Any]:
    """Assert that a reply is an error of the one form, and return what stands under `error`."""
    assert reply[0] == status, reply
    error = reply[2]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    text_ = json.dumps(reply[2])
    assert len(text_) <= 4096
    for word in ("Traceback", "site-packages", "0x", MARK, ".py"):
        assert word not in text_
    return error


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_what_is_no_sound_json_object_is_a_400(served: Served, body: bytes):
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        assert check_error(served.request(route, body), 400)["type"] == "BadRequestError"


@pytest.mark.parametrize(("route", "body", "param"), FIELDS.values(), ids=FIELDS.keys())
def test_a_wrong_field_is_a_400_that_names_it(served: Served, route: str, body: dict[str, Any], param: str | None):
    error = check_error(served.request(f"/v1/{route}", body), 400)
    if param is not None:
        assert re.split(r"[.\[]", error["param"])[0] == param, error
        assert error["param"] in error["message"]
    assert len(error["message"]) < 600


def test_neither_errors_nor_the_log_repeat_what_was_sent(served: Served):
    """Each field is tried by the parser alone (`test_request_parser.py`); here the ways from it to a client."""
    for route, body in (
        ("completions", text(prompt=LONG)),
        ("completions", text(stop=[MARK] * 17)),
        ("completions", text(prompt=LONG, stream=True)),
        ("completions", text(structured_outputs={"regex": f"{MARK}("}, user="x" * (1 << 20))),
        ("chat/completions", chat(messages=[{"role": MARK, "content": MARK}])),
    ):
        check_error(
            served.request(f"/v1/{route}", body), 400, "context_length_exceeded" if LONG in body.values() else None
        )
    assert check_error(served.request(f"/sleep?mode={MARK}", {}), 400)["param"] == "mode"
    error = check_error(served.request(f"/sleep?levl={MARK}", {}), 400)
    assert (error["param"], error["message"]) == ("levl", "levl: unknown query parameter; allowed: level, mode")
    assert check_error(served.request(f"/wake_up?tags={MARK}", {}), 400)["param"] == "tags"
    assert MARK not in served.log.read_text()


def test_a_prompt_beyond_the_context_is_refused_by_openais_words_and_cut_only_if_asked(served: Served):
    for stream in (False, True):
        body = text(prompt="x" * 130, stream=stream)
        error = check_error(served.request("/v1/completions", body), 400, "context_length_exceeded")
        assert error["message"].startswith("This model's maximum context length is 128 tokens, but your prompt has 130")
    for kept, num_tokens in ((-1, 127), (5, 5)):
        body = text(prompt="x" * 130, max_tokens=1, truncate_prompt_tokens=kept)
        status, _, found = served.request("/v1/completions", body)
        assert (status, found["usage"]["prompt_tokens"]) == (200, num_tokens)


def test_null_counts_as_left_out_and_meaningless_fields_are_taken(served: Served):
    body = chat(
        temperature=None, stop=None, tools=None, tool_choice="none", user="me", store=True, metadata={"a": "b"},
        service_tier="auto", parallel_tool_calls=True, n=1, best_of=1, modalities=["text"], logit_bias=None,
    )  # fmt: skip
    status, headers, _ = served.request("/v1/chat/completions", body)
    assert status == 200
    assert "warning" not in headers


def test_an_unknown_field_is_a_warning_and_an_error_where_the_server_is_strict(served: Served, tiny, log):
    status, headers, _ = served.request("/v1/completions", text(temprature=1))
    assert status == 200
    assert "did you mean temperature?" in headers["warning"]
    for route, fields in (("/v1/chat/completions", chat(x_field=1)), ("/tokenize", {"messages": USER, "x_field": 1})):
        status, headers, _ = served.request(route, {**fields, "chat_template_kwargs": {'a"b': 1}})
        assert status == 200
        assert headers["warning"] == (
            '199 jpaged "unknown fields are ignored: x_field", '
            """199 jpaged "the chat template does not read a'b, left out; it reads: nothing\""""
        )
    with serving(tiny, *FLAGS, "--strict", log=log) as strict:
        error = check_error(strict.request("/v1/completions", text(temprature=1)), 400)
    assert error["message"].startswith("temprature: unknown field; did you mean temperature?")


ROUTES = [
    ("GET", "/nothing", 404), ("POST", "/", 405), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405),
    ("POST", "/v1/embeddings", 404), ("GET", "/v1/responses", 405), ("GET", "//v1/models", 404),
    ("GET", "/v1/models/", 404), ("GET", "/v1/models/none", 404),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "status"), ROUTES)
def test_an_unknown_route_is_a_404_and_a_wrong_method_a_405(served: Served, method: str, path: str, status: int):
    body = {} if method == "POST" else None
    code = "model_not_found" if path.startswith("/v1/models/") else None
    check_error(served.request(path, body, method=method), status, code)


def test_an_unknown_model_is_a_404_that_names_it(served: Served):
    error = check_error(served.request("/v1/completions", text(model="x")), 404, "model_not_found")
    assert (error["message"], error["param"]) == ("The model `x` does not exist.", "model")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_that_says_it_is_no_json_is_a_415(served: Served, kind: str):
    check_error(served.request("/v1/completions", text(), headers={"content-type": kind}), 415)


def test_a_compressed_body_is_a_415(served: Served):
    import gzip

    bomb = gzip.compress(json.dumps(text(prompt="x" * 50_000_000)).encode())
    headers = {"content-encoding": "gzip"}
    check_error(served.request("/v1/completions", bomb, headers=headers), 415)


def test_bad_requests_leave_a_neighbours_tokens_alone(served: Served):
    """A stream runs while all bad bodies are refused: its tokens are those that it has alone."""
    asked = text(prompt="Alone", max_tokens=100, temperature=1.0, seed=5, ignore_eos=True)
    alone = served.request("/v1/completions", asked)[2]["choices"][0]["text"]
    texts: list[str] = []

    def run() -> None:
        for _ in range(3):
            texts.append(served.request("/v1/completions", asked)[2]["choices"][0]["text"])

    thread = threading.Thread(target=run)
    thread.start()
    for route, body, _ in list(FIELDS.values())[::3]:
        assert served.request(f"/v1/{route}", body)[0] == 400
    thread.join()
    assert texts == [alone] * 3
    assert served.is_idle()
