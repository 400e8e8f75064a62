"""What becomes of a request whose client leaves before its body was parsed."""

import asyncio
import threading
from functools import partial
from typing import Any

from jpaged import Engine
from jpaged.serving.http.body_parser import NUM_THREADS
from jpaged.serving.http.generation import Generation
from jpaged.serving.http.server_state import ServerState
from jpaged.serving.options import ServeOptions, served_limits
from jpaged.serving.protocols.encoders import CompletionEncoder
from jpaged.serving.protocols.parser_process import ParserProcess
from jpaged.serving.protocols.request_parser import RequestParser


def test_a_body_whose_client_has_left_is_parsed_only_if_a_thread_has_begun(engine: Engine):
    async def receive() -> dict[str, Any]:
        await have_left.wait()
        return {"type": "http.disconnect"}

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    def parse(parser: Any, body: bytes | bytearray) -> Any:
        begun.append(body)
        may_end.wait()

    async def run() -> None:
        state = ServerState(ServeOptions(), ("tiny",), served_limits({}), "0")
        parser = RequestParser(engine.builder, ("tiny",))
        state.bodies.serve(parser, ParserProcess(parser))
        scope = {"headers": [], "path": "/v1/completions"}
        generations = [
            Generation(state, scope).run(partial(state.bodies.parse, b"body", parse), CompletionEncoder, receive, send)
            for _ in range(4 * NUM_THREADS)
        ]
        tasks = asyncio.gather(*generations)
        while len(begun) < NUM_THREADS:
            await asyncio.sleep(0.001)
        have_left.set()
        await tasks  # While the threads still parse.
        assert state.bodies.is_parsing
        may_end.set()
        await state.bodies.parse(b"last", parse)
        assert begun == [b"body"] * NUM_THREADS + [b"last"]
        assert not sent
        await state.close()

    have_left, may_end = asyncio.Event(), threading.Event()
    begun: list[bytes] = []
    sent: list[dict[str, Any]] = []
    asyncio.run(asyncio.wait_for(run(), 20))
