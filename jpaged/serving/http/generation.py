"""One HTTP request that generates, from its body to the last byte of its response.

body ─▶ parser (a thread or another process) ─▶ core ─▶ encoder ─▶ client
a client that leaves, a deadline or the end of the server interrupts it: its requests are aborted
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import ConfigError
from ...outputs import RequestOutput, StepOutputs
from ..protocols.encoder import Encoder
from ..protocols.generation_request import GenerationRequest
from ..protocols.http_errors import CLIENT_GONE, HTTPError, error_summary, http_error, unavailable
from .responses import ID_KEY, client_left, protocol_at, warning_headers
from .server_state import ServerState

if TYPE_CHECKING:
    from ...remote.core_client import OutputStream

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADERS = [(b"content-type", b"application/json")]
Result = TypeVar("Result")


class Generation:
    """The response to one request, while it is written."""

    def __init__(self, state: ServerState, scope: Any):
        """`scope` is the request's, as ASGI has it."""
        self.state, self.scope = state, scope
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the response, beside those of its kind."""
        self.encoder: Encoder | None = None
        self.interruption: HTTPError | None = None
        """Why it ends early. Its client is told, unless it is what has left."""
        self._awaited: asyncio.Future[Any] | None = None
        """What comes before outputs: the parsed request, then its stream, which may have to wait for a step."""
        self.stream: OutputStream | None = None
        self.last_sent_s = time.monotonic()
        self.is_waiting = True
        self.has_begun = False
        """The status and the headers have been sent."""

    def interrupt(self, reason: HTTPError) -> None:
        """End the response early: nothing is sent any more but `reason`, and nothing at all if it is CLIENT_GONE."""
        if self.interruption is None:
            self.interruption = reason
        if self._awaited is not None:
            self._awaited.cancel()
        if self.stream is not None and not self.is_waiting:  # An event is being sent, perhaps for long.
            self.stream.close()
        self.nudge()

    def nudge(self) -> None:
        """Wake the task that waits for outputs: it looks at `interruption` and at the time of its last event."""
        if self.stream is not None:
            self.stream.nudge()

    async def run(
        self,
        parse: Callable[[], asyncio.Future[GenerationRequest]],
        encoder_type: type[Encoder],
        receive: Callable[[], Any],
        send: Callable[[Any], Any],
    ) -> None:
        """Parse the request, compute it, and send the response; an error may be the last event of a stream."""
        watch, timeout = asyncio.create_task(self._watch(receive)), self._start_timeout()
        self.state.generations.add(self)
        tracing, failure = self.state.tracing, None
        span = None if tracing is None else tracing.start(self.scope["headers"], self.scope["path"])
        try:
            await self._generate(parse, encoder_type, send)
        except Exception as error:
            failure = http_error(error)
            await self._fail(failure, send)
        finally:
            if tracing is not None:
                tracing.end(span, self._attributes(), None if failure is None else error_summary(failure))
            self.state.generations.discard(self)
            if timeout is not None:
                timeout.cancel()
            watch.cancel()
            if self.stream is not None:
                self.stream.close()

    def _start_timeout(self) -> asyncio.TimerHandle | None:
        """Interrupt the request once it has taken as long as it may; None if there is no limit."""
        max_s = self.state.limits["request_s"]
        if max_s is None:
            return None
        error = HTTPError(504, f"the request has not ended within {max_s} s, the server's limit request_s")
        return asyncio.get_running_loop().call_later(max_s, self.interrupt, error)

    def _attributes(self) -> dict[str, Any]:
        """Return what a span tells of the response, under the names of OpenTelemetry's conventions."""
        if self.encoder is None:
            return {}
        counts = self.encoder.counts
        return {
            "gen_ai.request.model": self.state.model_names[0],
            "gen_ai.response.id": self.encoder.id,
            "gen_ai.usage.input_tokens": counts.num_prompt_tokens,
            "gen_ai.usage.output_tokens": counts.num_output_tokens,
            "gen_ai.usage.cached_tokens": counts.num_cached_tokens,
            "gen_ai.request.choice.count": self.encoder.request.num_samples,
        }

    async def _watch(self, receive: Callable[[], Any]) -> None:
        await client_left(receive)
        self.interrupt(HTTPError(CLIENT_GONE, "the client has left"))

    async def _generate(
        self,
        parse: Callable[[], asyncio.Future[GenerationRequest]],
        encoder_type: type[Encoder],
        send: Callable[[Any], Any],
    ) -> None:
        state = self.state
        request = await self._unless_interrupted(parse())
        self.headers += warning_headers(request.warnings)
        if request.client_id is not None:
            self.scope[ID_KEY] = request.client_id
        self._raise_if_interrupted()
        try:
            submit = state.engine.submit(request.new_requests, takes_deltas=request.is_stream)
            self.stream = await self._unless_interrupted(asyncio.ensure_future(submit))
        except ConfigError:  # It has gone to sleep since it was looked at.
            state.check_ready()
            raise
        self._raise_if_interrupted()
        self.encoder = encoder = encoder_type(
            request,
            self.stream.request_ids,
            state.parser.tokenizer,
            created=int(time.time()),
            fingerprint=state.fingerprint,
            answer_format=state.parser.builder.encoder.answer_format,
            http_id=self.scope.get(ID_KEY, ""),
        )
        if request.is_stream:
            await self._send_events(encoder, send)
        else:
            await self._send_complete(encoder, send)

    async def _unless_interrupted(self, future: asyncio.Future[Result]) -> Result:
        """Wait for a future, which an interruption cancels. Raise the reason of that."""
        self._awaited = future
        try:
            return await future
        except asyncio.CancelledError:
            self._raise_if_interrupted()
            raise

    async def _send_complete(self, encoder: Encoder, send: Callable[[Any], Any]) -> None:
        """Wait for all outputs, and send them as one body."""
        request = encoder.request
        outputs: dict[str, RequestOutput] = {}
        while len(outputs) < len(request.new_requests):
            taken = await self._take()
            if taken is not None:
                outputs |= {output.request_id: output for output in taken.outputs}
        _check_ends(list(outputs.values()))
        has_much = request.is_echoed or request.num_prompt_logprobs is not None
        body = await asyncio.to_thread(encoder.body, outputs) if has_much else encoder.body(outputs)
        await self._start(200, [*JSON_HEADERS, (b"content-length", str(len(body)).encode())], send)
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, encoder: Encoder, send: Callable[[Any], Any]) -> None:
        """Send the outputs as events, as they come. Nothing is taken while the client does not read."""
        await self._start(200, EVENT_HEADERS, send)
        await self._send_event(encoder.opening(), send)
        num_prompts, ended = len(encoder.request.new_requests), list[RequestOutput]()
        silence_s = self.state.limits["silence_s"]
        while len(ended) < num_prompts:
            taken = await self._take()
            if taken is None:
                if silence_s and time.monotonic() - self.last_sent_s >= silence_s:
                    await self._send_event(encoder.keepalive, send)
                continue
            encoder.take_prompt_logprobs(taken.prompt_logprobs)
            deltas = [delta for delta in taken.deltas if delta.finish_reason not in _FAILED]
            has_much = bool(taken.prompt_logprobs)
            await self._send_event(
                await asyncio.to_thread(encoder.chunks, deltas) if has_much else encoder.chunks(deltas), send
            )
            ended += taken.outputs
            _check_ends(taken.outputs)
        await send({"type": "http.response.body", "body": encoder.closing(ended), "more_body": False})

    async def _send_event(self, event: bytes, send: Callable[[Any], Any]) -> None:
        """Send an event, or several; nothing for b""."""
        if event:
            self.is_waiting = False
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self.is_waiting, self.last_sent_s = True, time.monotonic()

    async def _take(self) -> StepOutputs | None:
        """Wait for outputs; None if there are none yet. Raise the reason for which the response ends early."""
        assert self.stream is not None
        self._raise_if_interrupted()  # An interruption during `send` has woken nobody.
        taken = await self.stream.take()
        self._raise_if_interrupted()
        return taken

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]], send: Callable[[Any], Any]) -> None:
        self.has_begun = True
        await send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def _fail(self, error: HTTPError, send: Callable[[Any], Any]) -> None:
        """Send an error: as the response, or as the last event of a stream that has begun."""
        if error.status == CLIENT_GONE:
            return
        if self.has_begun:
            assert self.encoder is not None, "only an encoder begins a response"
            await send({"type": "http.response.body", "body": self.encoder.failure(error), "more_body": False})
            return
        body = protocol_at(self.scope).error_body(error, self.scope.get(ID_KEY, ""))
        more = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await self._start(error.status, [*JSON_HEADERS, (b"content-length", str(len(body)).encode()), *more], send)
        await send({"type": "http.response.body", "body": body})

    def _raise_if_interrupted(self) -> None:
        if self.interruption is not None:
            raise self.interruption


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
