"""What becomes of bodies that no thread parses: their clients have left, or the server still starts."""

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from jpaged import Engine
from jpaged.serving.http.app import make_app
from jpaged.serving.http.body_parser import NUM_THREADS, BodyParser
from jpaged.serving.http.generation import Generation
from jpaged.serving.http.server_state import ServerState
from jpaged.serving.options import ServeOptions, served_limits
from jpaged.serving.protocols.completions.encoder import CompletionEncoder
from jpaged.serving.protocols.http_errors import HTTPError
from jpaged.serving.protocols.parser_process import ParserProcess
from jpaged.serving.protocols.request_parser import RequestParser
from jpaged.serving.protocols.table import GENERATION_ROUTES


def test_a_body_whose_client_has_left_is_parsed_only_if_a_thread_has_begun(engine: Engine):
    async def receive() -> dict[str, Any]:
        await have_left.wait()
        return {"type": "http.disconnect"}

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    def parse(parser: Any, body: bytearray) -> Any:
        begun.append(bytes(body))
        may_end.wait()

    async def run() -> None:
        state = ServerState(ServeOptions(), ("tiny",), served_limits({}), "0")
        parser = RequestParser(engine.builder, ("tiny",))
        state.bodies.serve(parser, ParserProcess(parser))
        scope = {"headers": [], "path": "/v1/completions"}
        generations = [
            Generation(state, scope).run(
                partial(state.bodies.parse, bytearray(b"body"), parse), CompletionEncoder, receive, send
            )
            for _ in range(4 * NUM_THREADS)
        ]
        tasks = asyncio.gather(*generations)
        while len(begun) < NUM_THREADS:
            await asyncio.sleep(0.001)
        have_left.set()
        await tasks  # While the threads still parse.
        assert state.bodies.is_parsing
        may_end.set()
        await state.bodies.parse(bytearray(b"last"), parse)
        assert begun == [b"body"] * NUM_THREADS + [b"last"]
        assert not sent
        await state.close()

    have_left, may_end = asyncio.Event(), threading.Event()
    begun: list[bytes] = []
    sent: list[dict[str, Any]] = []
    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("path", [*GENERATION_ROUTES, "/tokenize", "/detokenize"])
def test_bodies_that_come_before_the_start_is_over_are_not_held(path: str):
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"prompt": "Hi"}', "more_body": False}

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    sent: list[dict[str, Any]] = []
    state = ServerState(ServeOptions(), ("tiny",), {**served_limits({}), "pending_bytes": 20}, "0")
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "http_version": "1.1", "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    app = make_app(state, ())
    for _ in range(2):
        asyncio.run(app(dict(scope), receive, send))
    assert [event["status"] for event in sent if event["type"] == "http.response.start"] == [503, 503]
    state.bodies.hold(20)  # All that may be held.


def test_bodies_that_wait_have_no_more_bytes_than_the_limit_and_long_ones_leave_some_to_short_ones():
    bodies = BodyParser(80)
    bodies.hold(70, is_long=True)  # Seven eighths.
    for num_bytes, is_long in ((1, True), (11, False)):
        with pytest.raises(HTTPError, match="too many bytes of requests") as caught:
            bodies.hold(num_bytes, is_long=is_long)
        assert caught.value.status == 503
    bodies.hold(10)
    bodies.release(80)
    bodies.hold(80)
    bodies.close()
