"""The server below the level of a client library: keys, odd paths, limits, deadlines, sockets, pipelining."""

import asyncio
import itertools
import json
import re
import resource
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jpaged.serving.http.app import make_app
from jpaged.serving.http.http_protocol import uvicorn_config
from jpaged.serving.http.server import LimitedServer, allow_connections
from jpaged.serving.http.server_state import ServerState
from jpaged.serving.options import ServeOptions, served_limits

from .conftest import FLAGS, KEYS, SMALL
from .served import Served, command, read_all, serving, wait_until


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "Hi", "max_tokens": 2, **fields}


def post(body: Any, *headers: str, path: str = "/v1/completions", key: str = KEYS[0]) -> bytes:
    """Return the bytes of a POST request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, f"Authorization: Bearer {key}", *headers, "", ""]).encode() + data


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_every_route(locked: Served, key: str):
    headers = {"authorization": f"Bearer {key}"}
    assert locked.request("/v1/models", headers=headers)[0] == 200
    assert locked.request("/v1/completions", text(), headers=headers)[0] == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_server_answers_at_each_address_of_its_host(locked: Served, address: str):
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        pytest.skip("this machine does not have the address")
    with socket.create_connection((address, locked.port), timeout=30) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert statuses(read_all(connection)) == [200]


ODD = [
    "/v1/models", "//v1/models", "/v1/../metrics", "/metrics", "/health/", "/health/../metrics", "/live/x",
    "/%2e/metrics", "/tokenizer_info", "/version", "/v1/models?x=/health", "/nothing", "/./v1/models",
    "/\\metrics", "/v1/models%00", "/llm/metrics", "http://evil/health", "/is_sleeping", "/llm/llm/health",
]  # fmt: skip


@pytest.mark.parametrize("path", ODD)
@pytest.mark.parametrize(
    "header",
    [
        "", "Authorization: Bearer wrong", "Authorization: Bearer ", "Authorization: first-key",
        "Authorization: Basic x", "Authorization: Bearer first-key\r\nAuthorization: Bearer first-key",
    ],
    ids=["none", "wrong", "empty", "no scheme", "basic", "twice"],
)  # fmt: skip
@pytest.mark.parametrize("host", ["x", "x/health", "127.0.0.1:8000?/live"])
def test_no_odd_path_or_host_gets_past_the_key(locked: Served, path: str, header: str, host: str):
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close", *([header] if header else []), "", ""]
    assert statuses(locked.raw("\r\n".join(lines).encode()))[0] in (400, 401)


def test_open_paths_need_no_key(locked: Served):
    for path in ("/health", "/live", "/"):
        assert locked.request(path, headers={"authorization": ""})[0] == 200, path


def test_a_401_says_how_to_send_a_key(locked: Served):
    status, headers, body = locked.request("/v1/models", headers={"authorization": "Bearer x"})
    assert (status, headers["www-authenticate"], body["error"]["type"]) == (401, "Bearer", "AuthenticationError")
    assert body["error"]["code"] == "invalid_api_key"
    assert not any(key in json.dumps(body) + locked.log.read_text() for key in KEYS)


def punctuation(body: dict[str, Any]) -> int:
    """Return the commas, colons and opening brackets of a body."""
    return sum(json.dumps(body).count(char) for char in ",:[{")


AT_LIMIT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompts": (text(prompt=["a"] * 3), text(prompt=["a"] * 4)),
    "samples": (text(n=2), text(n=3)),
    "stop": (text(stop=["a"] * 2), text(stop=["a"] * 3)),
    "bad_words": (text(bad_words=["a"] * 2), text(bad_words=["a"] * 3)),
    "logit_bias": (text(logit_bias={"1": 1, "2": 2}), text(logit_bias={"1": 1, "2": 2, "3": 3})),
    "json_depth": (text(user={"a": [[[5]]]}), text(user={"a": [[[[5]]]]})),
    "body_bytes": (text(user="x" * (2000 - len(json.dumps(text(user=""))))),
                   text(user="x" * (2001 - len(json.dumps(text(user="")))))),
    "json_values": (text(user="," * (40 - punctuation(text(user="")))),
                    text(user="," * (41 - punctuation(text(user=""))))),
    "waiting_tokens": (text(prompt="x" * 100), text(prompt="x" * 101)),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_LIMIT)
def test_a_limit_is_taken_and_one_more_is_refused(locked: Served, name: str):
    at, above = AT_LIMIT[name]
    assert locked.request("/v1/completions", at)[0] == 200
    status, _, body = locked.request("/v1/completions", above)
    assert status == (413 if name == "body_bytes" else 400)
    assert str(SMALL[name]) in body["error"]["message"]


def test_a_body_in_chunks_has_the_same_limit(locked: Served):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    )
    head += f"Authorization: Bearer {KEYS[0]}\r\n\r\n".encode()
    chunk = b"400\r\n" + b" " * 0x400 + b"\r\n"
    assert statuses(locked.raw(head + chunk * 2 + b"0\r\n\r\n")) == [413]
    data = json.dumps(text()).encode()
    whole = head + f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n"
    assert statuses(locked.raw(whole.replace(b"Host: x", b"Host: x\r\nConnection: close"))) == [200]


def test_headers_have_a_number_and_a_length(locked: Served):
    more = [f"X-{index}: a" for index in range(SMALL["headers"] - 5)]
    assert statuses(locked.raw(post(text(), *more, "Connection: close"))) == [200]
    assert statuses(locked.raw(post(text(), *more, "X-More: a", "Connection: close"))) == [431]
    assert statuses(locked.raw(post(text(), "Connection: close", f"X-Long: {'a' * 3000}"))) == [200]
    assert statuses(locked.raw(post(text(), f"X-Long: {'a' * 8000}"))) == [431]
    assert statuses(locked.raw(b"GET /" + b"a" * 9000)) == [431]


@pytest.mark.parametrize("data", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"\0\r\n\r\n"])
def test_what_is_no_http_gets_an_error_of_the_one_form(locked: Served, data: bytes):
    reply = locked.raw(data)
    if reply:  # Nothing comes where no request can be seen in what was sent; the connection is closed in time.
        assert statuses(reply) == [400]
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "BadRequestError"


WAITING = {
    "nothing": (b"", []),
    "half of the headers": (b"GET /health HTTP/1.1\r\nHost: x\r\n", [408]),
    "half of the body": (post(text())[:-10], [408]),
    "a whole request": (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", [200]),
}
"""What a connection has sent before it waits, and the statuses of the answers before it is closed."""


def test_connections_that_wait_are_closed_in_time(locked: Served):
    def answer_to(data: bytes) -> tuple[list[int], float]:
        start = time.monotonic()
        return statuses(locked.raw(data)), time.monotonic() - start

    with ThreadPoolExecutor(len(WAITING)) as pool:
        found = pool.map(answer_to, [data for data, _ in WAITING.values()])
        for (name, (_, wanted)), (answers, waited_s) in zip(WAITING.items(), found, strict=True):
            assert answers == wanted, name
            assert 0.8 < waited_s < 4, name


def test_a_trickle_of_bytes_does_not_keep_a_request_open(locked: Served):
    start = time.monotonic()
    with socket.create_connection(("127.0.0.1", locked.port)) as connection:
        connection.settimeout(0.1)
        parts = []
        for byte in post(text())[:60]:
            try:
                connection.sendall(bytes([byte]))
                parts.append(connection.recv(1000))
                break
            except TimeoutError:
                continue
            except OSError:
                break
    assert time.monotonic() - start < 3
    assert statuses(b"".join(parts)) in ([408], [])


def test_more_connections_than_the_limit_get_a_503(locked: Served):
    wait_until(lambda: locked.request("/health")[0] == 200, 20)
    open_ones = [socket.create_connection(("127.0.0.1", locked.port)) for _ in range(SMALL["connections"])]
    try:
        time.sleep(0.2)
        assert statuses(locked.raw(b"")) == [503]
    finally:
        for one in open_ones:
            one.close()
    wait_until(lambda: locked.request("/health")[0] == 200, 20)


def test_pipelined_requests_are_answered_in_order(locked: Served):
    sent = post(text()) + post(text(prompt="")) + post(text(), "Connection: close")
    assert statuses(locked.raw(sent)) == [200, 400, 200]
    assert statuses(locked.raw(sent, chunks=7)) == [200, 400, 200]


def test_a_key_has_so_many_requests_at_a_time(locked: Served):
    body = text(max_tokens=100, ignore_eos=True, stream=True)
    open_ones = []
    for _ in range(SMALL["requests_per_key"]):
        connection = socket.create_connection(("127.0.0.1", locked.port))
        connection.sendall(post(body | {"n": 1}))
        open_ones.append(connection)
    # Their answers may end before the next request comes: paused, they cannot.
    for connection in open_ones:
        connection.close()
    wait_until(locked.is_idle, 5)
    assert locked.request("/pause", {}, method="POST")[0] == 200
    try:
        for _ in range(SMALL["requests_per_key"]):
            connection = socket.create_connection(("127.0.0.1", locked.port))
            connection.sendall(post(body))
            open_ones.append(connection)
        wait_until(lambda: locked.metrics()["jpaged:num_requests_waiting"] == SMALL["requests_per_key"], 20)
        status, headers, found = locked.request("/v1/completions", text())
        assert (status, headers["retry-after"], found["error"]["type"]) == (429, "1", "RateLimitError")
        assert found["error"]["code"] == "rate_limit_exceeded"
        other = {"authorization": f"Bearer {KEYS[1]}"}
        status, headers, found = locked.request("/v1/completions", text(prompt="x" * 99), headers=other)
        assert (status, headers["retry-after"]) == (503, "1")
        assert "waiting_tokens" in found["error"]["message"]
        assert found["error"]["code"] is None
    finally:
        for connection in open_ones:
            connection.close()
        locked.request("/resume", {}, method="POST")
    wait_until(locked.is_idle, 5)
    assert locked.request("/v1/completions", text())[0] == 200


def http_1_0(request: bytes) -> bytes:
    """Return a request whose response comes without chunks and ends with its connection."""
    return request.replace(b"HTTP/1.1", b"HTTP/1.0", 1)


def test_readers_of_lines_find_whole_events_and_bodies(locked: Served):
    """httpx and requests end lines as `str.splitlines` does: at three characters that JSON may hold."""

    def body(fields: dict[str, Any], path: str = "/v1/completions") -> str:
        return locked.raw(http_1_0(post(fields, path=path))).partition(b"\r\n\r\n")[2].decode()

    prompt = "a\x85b\u2028c\u2029d"
    asked = text(prompt=prompt, echo=True)
    *lines, done = filter(None, body(asked | {"stream": True}).splitlines())
    assert done == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks).startswith(prompt)
    (line,) = body(asked).splitlines()
    assert json.loads(line)["choices"][0]["text"].startswith(prompt)
    (line,) = body({"tokens": json.loads(body({"prompt": prompt}, "/tokenize"))["tokens"]}, "/detokenize").splitlines()
    assert json.loads(line) == {"prompt": prompt}


class BlankLineDecoder:
    """Reads a stream as openai-go before 3.43 and its forks: an empty line ends an event, also one without data."""

    def __init__(self, reply: Any):
        self.reply, self.num_comments = reply, 0

    def events(self) -> Iterator[Any]:
        """Yield the JSON of each event; an event without data is a JSONDecodeError."""
        data = b""
        for line in self.reply:
            name, _, value = line.rstrip(b"\n").partition(b":")
            if not name and not value:
                if data.startswith(b" [DONE]"):
                    return
                yield json.loads(data)
                data = b""
            elif name == b"data":
                data += value
            elif not name:
                self.num_comments += 1


def test_a_comment_in_silence_is_no_event_for_a_client_that_takes_an_empty_line_for_one(locked: Served):
    asked = http_1_0(post(text(stream=True, ignore_eos=True)))
    with socket.create_connection(("127.0.0.1", locked.port), timeout=15) as connection:
        assert locked.request("/pause", {}, method="POST")[0] == 200
        try:
            connection.sendall(asked)
            reply = connection.makefile("rb")
            head = list(iter(reply.readline, b"\r\n"))
            assert statuses(head[0]) == [200]
            first = reply.readline()
        finally:
            locked.request("/resume", {}, method="POST")
        decoder = BlankLineDecoder(itertools.chain([first], reply))
        events = list(decoder.events())
        reply.close()
    assert decoder.num_comments > 0
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_request_that_takes_too_long_gets_a_504(tiny: str, log: Path):
    with serving(tiny, *FLAGS, "--limits", "request_s=1", log=log) as server:
        assert server.request("/pause", {}, method="POST")[0] == 200
        assert server.request("/v1/completions", text())[0] == 504
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(post(text(stream=True), "Connection: close"))
            reply = read_all(connection)
        assert statuses(reply) == [200]
        assert b'"type":"TimeoutError"' in reply
        assert b"[DONE]" not in reply
        assert server.request("/resume", {}, method="POST")[0] == 200
        wait_until(server.is_idle, 2)


def test_https_is_served_by_a_certificate(tiny: str, tmp_path: Path, log: Path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run(
        ["openssl", "req", *options, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True
    )
    with serving(tiny, *FLAGS, "--ssl-certfile", cert, "--ssl-keyfile", key, log=log, awaits=False) as server:
        context = ssl.create_default_context(cafile=str(cert))

        def health() -> list[int]:
            plain = socket.create_connection(("127.0.0.1", server.port))
            with context.wrap_socket(plain, server_hostname="localhost") as connection:
                connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return statuses(read_all(connection))

        assert health() == [200]


def test_a_unix_socket_is_served_removed_and_taken_over(tiny: str, tmp_path: Path):
    path = tmp_path / "socket"

    def live() -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(path))
            except OSError:
                return False
            connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return statuses(read_all(connection)) == [200]

    for is_killed in (True, False):  # The second start finds the socket of a server that was killed.
        _serve_at(path, tiny, tmp_path / "log", live, is_killed=is_killed)
        assert path.exists() is is_killed


def _serve_at(path: Path, model: str, log: Path, is_live: Callable[[], bool], *, is_killed: bool) -> None:
    """Start a server at a unix socket, and end it once it answers."""
    with log.open("wb") as stream:
        process = subprocess.Popen(command(model, *FLAGS, "--uds", path), stderr=stream)
    wait_until(lambda: is_live() or process.poll() is not None, 60)
    assert process.poll() is None, log.read_text()
    (process.kill if is_killed else process.terminate)()
    assert (process.wait(20) == 0) is not is_killed


def ask(path: str, headers: dict[str, str], *, method: str = "GET", **options: Any) -> tuple[int, dict[str, str]]:
    """Return status and headers of the answer to one request of a server that still starts, with the key "k"."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "http_version": "1.1", "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    state = ServerState(ServeOptions(**options), ("tiny",), served_limits({}), "0")
    asyncio.run(make_app(state, ("k",))(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


GOOD = {"origin": "http://good", "authorization": "Bearer k"}


@pytest.mark.parametrize("origins", ["http://good", "*"])
def test_pages_of_an_allowed_origin_may_call_the_server(origins: str):
    for path, status in {"/live": 200, "/v1/models": 503, "/none": 404}.items():
        found, headers = ask(path, GOOD, allowed_origins=origins)
        assert (found, headers["access-control-allow-origin"]) == (status, origins)
    _, headers = ask("/live", GOOD | {"origin": "http://bad"}, allowed_origins=origins)
    assert ("access-control-allow-origin" in headers) is (origins == "*")
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    asked |= {"origin": "http://good"}
    status, headers = ask("/v1/completions", asked, method="OPTIONS", allowed_origins=origins)
    assert (status, headers["access-control-allow-origin"]) == (200, origins)


def test_pages_may_read_the_headers_that_tell_of_a_request_also_of_an_error():
    for path, key, status in (("/live", "k", 200), ("/version", "no", 401), ("/v1/models", "k", 503), ("/x", "k", 404)):
        found, headers = ask(path, GOOD | {"authorization": f"Bearer {key}"}, allowed_origins="http://good")
        assert found == status
        exposed = headers["access-control-expose-headers"].lower().replace(" ", "").split(",")
        assert {"x-request-id", "retry-after", "warning"} <= set(exposed), path


def test_metrics_need_no_key_on_request():
    """The path to the letter; all others need a key as before."""
    assert ask("/metrics", {})[0] == 401
    assert ask("/metrics", {}, metrics_without_key=True)[0] == 200
    for path in ("/metrics/", "//metrics", "/Metrics", "/metrics/x", "/version", "/v1/models"):
        assert ask(path, {}, metrics_without_key=True)[0] == 401, path


def test_a_connection_without_a_request_stays_open_longer_than_those_of_proxies():
    """nginx keeps connections to its upstreams for 60 s, and a request on one that is being closed is lost."""
    assert uvicorn_config(None, served_limits({})).timeout_keep_alive == 75


def test_a_client_that_takes_nothing_is_given_up():
    """The application sends 64 MB; its sends end when the client has taken nothing for the limit's seconds."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        ended.append(time.monotonic())

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn_config(app, served_limits({"send_s": 1}))
            server = LimitedServer(config)
            serving_task = asyncio.create_task(server.serve([listener]))
            _, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1], limit=1024)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while not ended:
                await asyncio.sleep(0.01)
            server.should_exit = True
            await serving_task
            writer.close()

    ended: list[float] = []
    start = time.monotonic()
    asyncio.run(asyncio.wait_for(run(), 10))
    assert 0.9 < ended[0] - start < 5


def test_the_limit_on_open_files_is_raised_to_what_connections_need(caplog: pytest.LogCaptureFixture):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert allow_connections(700) == 700
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 900
        assert not caplog.records
        assert allow_connections(1 << 40) < 1 << 40
        assert "raise the limit: ulimit -n" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
