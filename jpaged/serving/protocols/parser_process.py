"""Parses long bodies in a process of its own: JSON of megabytes would hold Python's global lock, and so every stream.

    ParserProcess ── _Setup, then for each body: method, body ─▶ python -m jpaged.serving.protocols.parser_process
                  ◀── _Reply, after each body ──

Every message is its length, 8 bytes, and that many bytes: a body as it came, all others as msgpack. The process starts
with the first long body and ends when its stdin does.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any

import msgspec
import tokenizers

from ...config.engine_config import EngineConfig
from ...intake.request_builder import RequestBuilder
from ...messages import NewRequest, ResultForm
from ...sampling.logit_rules_spec import LogitRulesSpec
from ...sampling.sampling_params import BeamSearchParams, SamplingParams
from ...startup.import_path import import_path
from ...step.step_sizes import StepSizes
from ...text.grammar import Grammars
from ...text.prompts import PromptEncoder
from ...text.tokenizer import Tokenizer
from .generation_request import GenerationRequest
from .http_errors import HTTPError, http_error
from .request_parser import RequestParser

logger = logging.getLogger("jpaged")

LENGTH_BYTES = 8
MAX_REPLY_BYTES = 1 << 30
NICENESS = 5
"""By how much the process gives way to the server's threads."""
CONFIG_FIELDS = ("model", "limits", "max_logprobs", "scheduling_policy", "logprobs_mode")
"""Options of the engine that a parser reads."""
METHODS: dict[str, Callable[[RequestParser, bytes | bytearray], Any]] = {
    method.__name__: method
    for method in (
        RequestParser.parse_completion, RequestParser.parse_chat, RequestParser.tokenize, RequestParser.detokenize
    )
}  # fmt: skip
"""What the process does with a body, by name."""


class _Setup(msgspec.Struct, frozen=True, kw_only=True):
    """All that a parser is made of, as plain values."""

    names: tuple[str, ...]
    is_strict: bool
    config: dict[str, Any]
    sizes: StepSizes
    sampling_defaults: dict[str, Any]
    vocab_size: int
    eos_token_ids: frozenset[int]
    chat_template: str | None
    """The one that replaces the model's own."""
    tokenizer: str | None
    """As the package `tokenizers` writes it."""
    special_tokens: dict[str, str] = {}
    tokenizer_template: str | None = None
    """The model's own chat template."""


class _Failure(msgspec.Struct, frozen=True):
    """An HTTPError."""

    status: int
    message: str
    param: str | None
    headers: dict[str, str]


class _Reply(msgspec.Struct, frozen=True):
    """What a method has returned or raised."""

    value: Any = None
    failure: _Failure | None = None


class ParserProcess:
    """A process that parses bodies, one at a time. It starts with the first, and again after it has died."""

    def __init__(self, parser: RequestParser):
        """Prepare a process that parses as `parser` does; takes up to half a second for a large vocabulary."""
        self._setup = msgspec.msgpack.encode(_setup_of(parser))
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, method: str, body: bytes | bytearray) -> Any:
        """Return what the method of METHODS makes of a body; one thread calls. Raise HTTPError as it does.

        Raise HTTPError, a 500, if the process dies; the next body starts another one.
        """
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, method.encode())
            _send(process.stdin, body)
            reply = msgspec.msgpack.decode(_receive(process.stdout, MAX_REPLY_BYTES), type=_Reply)
        except (OSError, EOFError):
            self.close()
            logger.error("the process that parses long bodies has ended with status %s", process.wait())
            raise HTTPError(500, "the body could not be parsed: its process has ended; send less at once") from None
        if (failure := reply.failure) is not None:
            raise HTTPError(failure.status, failure.message, param=failure.param, headers=failure.headers)
        is_request = METHODS[method] in (RequestParser.parse_completion, RequestParser.parse_chat)
        return _request_of(reply.value) if is_request else reply.value

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C in a terminal reaches the server alone, which lets open requests end.
        command = [sys.executable, "-P", "-m", __name__]
        environment = {**os.environ, "PYTHONPATH": import_path()}
        process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert process.stdin is not None
        _send(process.stdin, self._setup)
        return process

    def close(self) -> None:
        """Kill the process. Any thread may call; a body that is being parsed fails."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()


def _setup_of(parser: RequestParser) -> _Setup:
    """Return what makes the same parser in another process."""
    builder, encoder = parser.builder, parser.builder.encoder
    assert not encoder.rules_spec.processors, "a server's engine has no processors, which are functions"
    tokenizer = encoder.tokenizer
    return _Setup(
        names=parser.names,
        is_strict=parser.is_strict,
        config={name: getattr(builder.config, name) for name in CONFIG_FIELDS},
        sizes=builder.sizes,
        sampling_defaults=dict(builder.sampling_defaults),
        vocab_size=encoder.vocab_size,
        eos_token_ids=encoder.eos_token_ids,
        chat_template=encoder.chat_template,
        tokenizer=None if tokenizer is None else tokenizer.backend.to_str(),
        special_tokens={} if tokenizer is None else tokenizer.special_tokens,
        tokenizer_template=None if tokenizer is None else tokenizer.chat_template,
    )


def _parser_of(setup: _Setup) -> RequestParser:
    """Return the parser that `_setup_of` was given."""
    config = EngineConfig(**setup.config)
    tokenizer, grammars = None, None
    if setup.tokenizer is not None:
        backend = tokenizers.Tokenizer.from_str(setup.tokenizer)
        tokenizer = Tokenizer(backend, setup.special_tokens, chat_template=setup.tokenizer_template)
        grammars = Grammars(tokenizer, setup.vocab_size, setup.eos_token_ids)
    rules_spec = LogitRulesSpec(setup.vocab_size, eos_token_ids=setup.eos_token_ids)
    encoder = PromptEncoder(
        tokenizer,
        rules_spec,
        setup.sizes.max_model_len,
        setup.chat_template,
        config.limits,
        setup.eos_token_ids,
        grammars,
    )
    builder = RequestBuilder(config, encoder, setup.sizes, setup.sampling_defaults)
    return RequestParser(builder, setup.names, is_strict=setup.is_strict)


def _request_of(fields: dict[str, Any]) -> GenerationRequest:
    """Return the request that was encoded as these fields."""
    new_requests = tuple(map(_new_request_of, fields["new_requests"]))
    return GenerationRequest(**{**fields, "new_requests": new_requests, "warnings": tuple(fields["warnings"])})


def _new_request_of(fields: dict[str, Any]) -> NewRequest:
    params_type = BeamSearchParams if "beam_width" in fields["params"] else SamplingParams
    decoded = {
        "params": params_type(**fields["params"]),
        "stop_ids": frozenset(fields["stop_ids"]),
        "bad_words": tuple(map(tuple, fields["bad_words"])),
        "form": ResultForm(fields["form"]),
    }
    return NewRequest(**{**fields, **decoded})


def _send(pipe: IO[bytes], message: bytes | bytearray) -> None:
    """Write a message to an unbuffered pipe."""
    for part in (len(message).to_bytes(LENGTH_BYTES), message):
        view = memoryview(part)
        while view:
            view = view[pipe.write(view) :]


def _receive(pipe: IO[bytes], max_bytes: int | None = None) -> bytearray:
    """Return the next message of an unbuffered pipe. Raise EOFError at its end, and for one that is too long."""
    num_bytes = int.from_bytes(_read(pipe, LENGTH_BYTES))
    if max_bytes is not None and num_bytes > max_bytes:
        raise EOFError(f"a message of {num_bytes} bytes")
    return _read(pipe, num_bytes)


def _read(pipe: Any, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        num_read = pipe.readinto(view)
        if not num_read:
            raise EOFError
        view = view[num_read:]
    return data


def _reply(parser: RequestParser, method: str, body: bytearray) -> bytes:
    """Return the encoded reply to a body."""
    try:
        return msgspec.msgpack.encode(_Reply(METHODS[method](parser, body)))
    except Exception as error:
        failure = http_error(error)
        told = _Failure(failure.status, failure.message, failure.param, failure.headers)
        return msgspec.msgpack.encode(_Reply(failure=told))


def main() -> None:
    """Parse the bodies on stdin until it ends."""
    os.nice(NICENESS)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    with open(0, "rb", buffering=0) as requests, open(os.dup(1), "wb", buffering=0) as replies:
        os.dup2(2, 1)  # What libraries print goes to the log.
        try:
            parser = _parser_of(msgspec.msgpack.decode(_receive(requests), type=_Setup))
            while True:
                method = _receive(requests).decode()
                _send(replies, _reply(parser, method, _receive(requests)))
        except (EOFError, BrokenPipeError):  # The server has ended.
            return


if __name__ == "__main__":
    main()
