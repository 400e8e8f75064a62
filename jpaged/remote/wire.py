"""The messages between a front and the core process that computes its requests.

    front ── Welcome, then Submit, Taken, Drop, Call, Expect, Pause, Stop ─▶ core
          ◀── its greeting, Progress, Ready or StartFailed, then Update, PromptPiece, Stopped ──

The first message of a core is its `greeting`, which is no msgpack: a front takes no other message of a core whose
version or whose types of messages differ from its own. Knows no engine and no socket.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import fields
from typing import Any, TypeAlias, cast

import msgspec

from .. import codec
from ..codec import PackedRequests
from ..intake.builder_setup import BuilderSetup
from ..outputs import Logprob, StepOutputs
from ..sampling.sampling_params import BeamSearchParams, SamplingParams
from .core_client import CoreSnapshot, CoreStatus
from .failures import Failure


class StartSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a core process is told at its start: one line of JSON on its stdin, which then stays open."""

    address: str
    """Where the front listens, as ZeroMQ writes it."""
    parent: int
    """Process id of the front."""
    maker: str
    """What makes the engine, "package.module:function". It is called with the config, a function that takes progress,
    and `options` by their names."""
    config: dict[str, Any]
    """Options of the engine that are not the default ones."""
    options: dict[str, Any]
    log_level: int
    cpus: tuple[int, ...] = ()
    """The processors that it may run on; empty: all."""
    host_bytes: int | None = None
    """Bytes of the host's memory that it may count on; None: all that are free."""


# To the core


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The greeting was right, and the socket's folder is gone: load the model."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Queue requests, all or none, for a stream; the answer has the stream's number."""

    stream: int
    takes_deltas: bool
    requests: PackedRequests


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The readers of these streams have taken their last outputs."""

    streams: dict[int, int]
    """Stream → the number of those outputs."""


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the requests of a stream whose reader takes no more outputs."""

    stream: int


class Call(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A named call, `CoreCalls` has them; the answer has its number."""

    number: int
    name: str
    arguments: tuple[Any, ...] = ()


class Expect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers of these numbers have not come: say so if one of them will not, since a message was lost."""

    numbers: tuple[int, ...]


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute no steps, or compute them again."""

    is_paused: bool


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Abort all requests and end."""


# From the core


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How far the start is."""

    name: str
    num_done: int
    num_parts: int


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine could not be made."""

    failure: Failure


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The core takes requests."""

    builder: bytes
    """What makes the builder of requests: a `BuilderSetup`, encoded."""
    memory: str
    """What the memory of the device is used for."""
    identity: str
    """Names the model, the options and the backend of the engine."""
    num_cached_pages: int
    """Pages that can be kept for later prefixes; 0 without a prefix cache."""
    status: CoreStatus


class StreamOutputs(msgspec.Struct, frozen=True, array_like=True):
    """What the requests of a stream have got. Outputs come without their prompts, which the front has.

    Where logprobs of a prompt belong stands SENT_BEFORE: they came in pieces, or came with an earlier output.
    """

    stream: int
    number: int
    """How many outputs the stream has had with these."""
    outputs: StepOutputs


class StreamFailure(msgspec.Struct, frozen=True, array_like=True):
    """No more outputs of a stream come."""

    stream: int
    failure: Failure


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The result of a `Call` or a `Submit`, or what it has raised."""

    number: int
    result: msgspec.Raw
    failure: Failure | None = None


class Update(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All that a step has for its readers, or the answers of calls, or a heartbeat."""

    status: CoreStatus
    outputs: tuple[StreamOutputs, ...] = ()
    answers: tuple[Answer, ...] = ()
    failures: tuple[StreamFailure, ...] = ()
    open_streams: dict[int, int] | None = None
    """In a heartbeat: stream that gets more outputs → the number of the last ones that were sent. The last outputs of
    all other streams were sent before it."""


class PromptPiece(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The next logprobs of the prompt of a request; the outputs that they belong to follow."""

    stream: int
    request_id: str
    start: int
    """The index of the first token that they belong to."""
    entries: tuple[dict[int, Logprob] | None, ...]


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message of a core that was told to stop."""

    snapshot: CoreSnapshot


ToCore: TypeAlias = Welcome | Submit | Taken | Drop | Call | Expect | Pause | Stop
FromCore: TypeAlias = Progress | StartFailed | Ready | Update | PromptPiece | Stopped

SENT_BEFORE = ()
"""Stands for the logprobs of a prompt, of which there is at least one."""


def read_by_core(data: bytes) -> ToCore:
    """Return a message of the front. Raise msgspec.DecodeError for what is none."""
    return codec.decode(data, cast(type[Any], ToCore))


def read_by_front(data: bytes) -> FromCore:
    """Return a message of the core. Raise msgspec.DecodeError for what is none."""
    return codec.decode(data, cast(type[Any], FromCore))


def greeting() -> bytes:
    """Return the first message of a core: "jpaged", its version and a digest of the types of its messages."""
    version = sys.modules[__name__.partition(".")[0]].__version__  # The package itself is above this module.
    return f"jpaged {version} {schema_digest()}".encode()


def schema_digest() -> str:
    """Return what differs for fronts and cores of other types of messages."""
    described = repr(msgspec.inspect.multi_type_info([ToCore, FromCore, StartSpec, BuilderSetup]))
    params = [f"{one.name}: {one.type}" for kind in (SamplingParams, BeamSearchParams) for one in fields(kind)]
    return hashlib.sha256("\n".join([described, *params]).encode()).hexdigest()[:16]
