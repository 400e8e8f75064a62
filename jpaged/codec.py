"""The one codec of messages between processes: msgpack, by the types of their classes.

A message is a `msgspec.Struct` or a frozen dataclass of plain values, in `messages`, `outputs` or beside what sends it;
a new message is a new type, and nothing here. Parameters of requests are checked again where they arrive, since only
their own classes know what they may be. Loads no JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self, TypeVar, cast

import msgspec

from .checks import INT64
from .messages import NewRequest, Params
from .sampling.sampling_params import BeamSearchParams, RequestParams, SamplingParams

Message = TypeVar("Message")

_ELSEWHERE = RequestParams()
"""Stands in a packed request for parameters that are sent beside it."""


def encode(message: Any) -> bytes:
    """Return a message as msgpack.

    Integers beyond 64 bits, which msgpack has not, become the nearest one that it has: as limits they mean the same.
    Raise TypeError for a value that is not plain, such as a function.
    """
    try:
        return _ENCODER.encode(message)
    except OverflowError:
        plain = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_encoded)
        return _ENCODER.encode(_within_64_bits(plain))


def decode(data: bytes | bytearray | memoryview, kind: type[Message]) -> Message:
    """Return the message of the class `kind` that was encoded.

    Raise msgspec.DecodeError if the bytes are no msgpack or no such message; for parameters of a request that their
    class refuses it has their class's words.
    """
    return cast(Message, _decoder(cast(type, kind)).decode(data))


class PackedRequests(msgspec.Struct, frozen=True, array_like=True):
    """Requests in which nothing long stands once for each: those of one body share parameters and grammars."""

    requests: tuple[NewRequest, ...]
    """Without what stands beside them."""
    params: tuple[Params, ...]
    grammars: tuple[str, ...]
    params_at: tuple[int, ...]
    """For each request the index of its parameters."""
    grammar_at: tuple[int, ...]

    @classmethod
    def of(cls, requests: Sequence[NewRequest]) -> Self:
        """Return the requests in this form."""
        params = {id(one.params): one.params for one in requests}
        grammars = dict.fromkeys(one.grammar for one in requests)
        params_at = {key: place for place, key in enumerate(params)}
        grammar_at = {grammar: place for place, grammar in enumerate(grammars)}
        return cls(
            tuple(msgspec.structs.replace(one, params=_ELSEWHERE, grammar="") for one in requests),
            tuple(params.values()),
            tuple(grammars),
            tuple(params_at[id(one.params)] for one in requests),
            tuple(grammar_at[one.grammar] for one in requests),
        )

    def unpacked(self) -> tuple[NewRequest, ...]:
        """Return the requests as they were."""
        places = zip(self.requests, self.params_at, self.grammar_at, strict=True)
        return tuple(
            msgspec.structs.replace(one, params=self.params[params_at], grammar=self.grammars[grammar_at])
            for one, params_at, grammar_at in places
        )


def _encoded(value: Any) -> None:
    """Return what stands for a value that msgspec has no form for."""
    if value is not _ELSEWHERE:
        raise TypeError(f"a value of the type {type(value).__name__} cannot be sent to another process")


def _decoded(kind: type, value: Any) -> Any:
    """Return the parameters of a request that msgspec has decoded as plain values."""
    if kind is not RequestParams:
        raise TypeError(f"{kind.__name__} is no type of a message")
    if value is None:
        return _ELSEWHERE
    return (BeamSearchParams if "beam_width" in value else SamplingParams)(**value)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)


@functools.cache
def _decoder(kind: type) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_decoded)


def _within_64_bits(value: Any) -> Any:
    """Return plain values with each integer within the range of 64 bits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return min(max(value, INT64[0]), INT64[1])
    if isinstance(value, dict):
        return {key: _within_64_bits(one) for key, one in value.items()}
    return [_within_64_bits(one) for one in value] if isinstance(value, list | tuple) else value
