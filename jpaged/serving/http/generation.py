"""One HTTP request that generates, from its body to the last byte of its answer.

body ─▶ front (a thread) ─▶ core ─▶ encoder ─▶ client
a client that leaves, a deadline or the end of the server interrupts it: its requests are aborted
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...outputs import RequestOutput
from ..protocols.encoders import Encoder
from ..protocols.generation_request import GenerationRequest
from ..protocols.replies import HTTPError, error_body, http_error, unavailable
from .server_state import SILENCE_S, ServerState

if TYPE_CHECKING:
    from ...async_engine import OutputStream
    from ...core.core_thread import StepOutputs

logger = logging.getLogger("jpaged")

COMMENT = b": waiting\n\n"
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADERS = [(b"content-type", b"application/json")]
GONE = "the client has left"


class Generation:
    """The answer to one request, while it is written."""

    def __init__(self, state: ServerState, scope: Any):
        """`scope` is the request's, as ASGI has it."""
        self.state, self.scope = state, scope
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the answer, beside those of every answer."""
        self.encoder: Encoder | None = None
        self.interruption: HTTPError | str | None = None
        """Why it ends early: GONE, or the error that its client is told."""
        self.stream: OutputStream | None = None
        self.last_sent_s = time.monotonic()
        self.is_waiting = True
        self.has_begun = False
        """The status and the headers have been sent."""

    def interrupt(self, reason: HTTPError | str) -> None:
        """End the answer early: nothing is sent any more but what `reason` says."""
        if self.interruption is None:
            self.interruption = reason
        self.nudge()

    def nudge(self) -> None:
        """Let it look whether it is interrupted, or silent for too long."""
        if self.stream is not None:
            self.stream.nudge()

    async def run(
        self,
        prepare: Callable[[], GenerationRequest],
        encoder_type: type[Encoder],
        receive: Callable[[], Any],
        send: Callable[[Any], Any],
    ) -> None:
        """Make the request, compute it, and send the answer. Errors become replies, or the last event of a stream."""
        watch = asyncio.create_task(self._watch(receive))
        seconds = self.state.limits["request_s"]
        limit = HTTPError(504, f"the request has not ended within {seconds} s, the server's limit request_s")
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.interrupt, limit)
        self.state.generations.add(self)
        tracing, failure = self.state.tracing, None
        span = None if tracing is None else tracing.start(self.scope["headers"], self.scope["path"])
        try:
            await self._generate(prepare, encoder_type, send)
        except Exception as error:
            failure = http_error(error)
            await self._fail(failure, send)
        finally:
            if tracing is not None:
                tracing.end(span, self._attributes(), None if failure is None else failure.message)
            self.state.generations.discard(self)
            if timer is not None:
                timer.cancel()
            watch.cancel()
            if self.stream is not None:
                self.stream.close()

    def _attributes(self) -> dict[str, Any]:
        """Return what a span tells of the answer, under the names of OpenTelemetry's conventions."""
        if self.encoder is None:
            return {}
        usage = self.encoder.usage()
        return {
            "gen_ai.request.model": self.state.names[0],
            "gen_ai.response.id": self.encoder.id,
            "gen_ai.usage.input_tokens": usage["prompt_tokens"],
            "gen_ai.usage.output_tokens": usage["completion_tokens"],
            "gen_ai.usage.cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "gen_ai.request.choice.count": self.encoder.request.num_samples,
        }

    async def _watch(self, receive: Callable[[], Any]) -> None:
        """Wait until the client has left."""
        while (await receive())["type"] != "http.disconnect":
            continue
        self.interrupt(GONE)

    async def _generate(
        self, prepare: Callable[[], GenerationRequest], encoder_type: type[Encoder], send: Callable[[Any], Any]
    ) -> None:
        state = self.state
        request = await state.in_thread(prepare)
        self._warn(request)
        self._check()
        self.stream = await state.engine.submit(request.messages, takes_deltas=request.is_stream)
        self._check()
        self.encoder = encoder = encoder_type(
            request,
            self.stream.request_ids,
            state.front.tokenizer,
            created=int(time.time()),
            fingerprint=state.fingerprint,
        )
        if request.is_stream:
            await self._send_events(encoder, len(request.messages), send)
        else:
            await self._send_whole(encoder, len(request.messages), send)

    async def _send_whole(self, encoder: Encoder, num_prompts: int, send: Callable[[Any], Any]) -> None:
        """Wait for all outputs, and send them as one body."""
        outputs: dict[str, RequestOutput] = {}
        while len(outputs) < num_prompts:
            taken = await self._take()
            if taken is not None:
                outputs |= {output.request_id: output for output in taken.outputs}
        _check_ends(list(outputs.values()))
        body = encoder.whole(outputs)
        await self._start(200, [*JSON_HEADERS, (b"content-length", str(len(body)).encode())], send)
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, encoder: Encoder, num_prompts: int, send: Callable[[Any], Any]) -> None:
        """Send the outputs as events, as they come. Nothing is taken while the client does not read."""
        await self._start(200, EVENT_HEADERS, send)
        ended: list[RequestOutput] = []
        events = encoder.opening()
        while True:
            if events:
                self.is_waiting = False
                await send({"type": "http.response.body", "body": events, "more_body": True})
                self.is_waiting, self.last_sent_s = True, time.monotonic()
            if len(ended) == num_prompts:
                break
            taken = await self._take()
            if taken is None:
                is_silent = time.monotonic() - self.last_sent_s >= SILENCE_S
                events = COMMENT if is_silent else b""
                continue
            encoder.take_prompt_logprobs(taken.prompt_logprobs)
            events = encoder.events([delta for delta in taken.deltas if delta.finish_reason not in _FAILED])
            ended += taken.outputs
            _check_ends(taken.outputs)
        await send({"type": "http.response.body", "body": encoder.closing(ended), "more_body": False})

    async def _take(self) -> StepOutputs | None:
        """Wait for outputs; None if there are none yet. Raise the reason for which the answer ends early."""
        assert self.stream is not None
        self._check()  # What has interrupted it while an event was sent has nudged nobody.
        taken = await self.stream.take()
        self._check()
        return taken

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]], send: Callable[[Any], Any]) -> None:
        self.has_begun = True
        await send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def _fail(self, error: HTTPError, send: Callable[[Any], Any]) -> None:
        """Send an error: as a reply, or as the last event of a stream that has begun."""
        if self.interruption == GONE:
            return
        if self.has_begun:
            await send({"type": "http.response.body", "body": Encoder.failure(error), "more_body": False})
            return
        body = error_body(error)
        more = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await self._start(error.status, [*JSON_HEADERS, (b"content-length", str(len(body)).encode()), *more], send)
        await send({"type": "http.response.body", "body": body})

    def _check(self) -> None:
        """Raise the reason for which the answer ends early, if there is one."""
        if isinstance(self.interruption, HTTPError):
            raise self.interruption
        if self.interruption is not None:
            raise HTTPError(499, self.interruption)

    def _warn(self, request: GenerationRequest) -> None:
        """Tell the log and the client of fields that neither OpenAI nor vLLM has."""
        if request.warnings:
            names = ", ".join(request.warnings)
            logger.warning("unknown fields of a request are ignored: %s", names)
            text = f'199 jpaged "unknown fields are ignored: {names}"'
            self.headers.append((b"warning", text.encode("ascii", "replace")))
        if request.client_id is not None:
            self.headers[:] = [pair for pair in self.headers if pair[0] != b"x-request-id"]
            self.headers.append((b"x-request-id", request.client_id.encode("ascii", "replace")))


_FAILED = ("error", "abort")
"""Finish reasons of a sample whose request has failed in the server."""


def _check_ends(outputs: Sequence[RequestOutput]) -> None:
    """Raise HTTPError for an output that an error or the server has ended."""
    for output in outputs:
        reasons = {sample.finish_reason for sample in output.outputs}
        if "error" in reasons or output.error is not None:
            raise HTTPError(500, output.error or "the request has failed")
        if "abort" in reasons:
            raise unavailable("the request was aborted by the server")
