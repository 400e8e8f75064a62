"""What the parsers of all protocols share: a body's fields, its model, and the checked requests that it asks for.

It is the server's front half, off the event loop. It holds a model's tokenizer and limits, and no engine: it can run in
a process without a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from ...checks import boolean, check, or_none, refusal, shown, told
from ...config.engine_config import EngineConfig
from ...errors import ContextLengthError, InvalidRequestError
from ...intake.request_builder import RequestBuilder
from ...messages import NewRequest
from ...sampling.sampling_params import BeamSearchParams, SamplingParams
from ...structured_outputs import StructuredOutputsParams
from ...text.grammar.structured_grammar import unenforced
from ...text.prompts import PromptEncoder
from ...text.tokenizing.tokenizer import Tokenizer
from .bodies import parse_body
from .fields import CLIENT_ID, BodyField, TakenFields, take_fields
from .generation_request import GenerationRequest
from .http_errors import unknown_model
from .nested_options import usage_of
from .places import Places


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a body asks for beside its prompts and how tokens are drawn."""

    max_tokens: int | None
    """Output tokens that the client has asked for; None if it has not."""
    num_logprobs: int | None
    is_stream: bool
    sent_names: Mapping[str, str]
    """Fields of the engine → how the body calls them, where that differs; see `checks.sent_as`."""
    is_echoed: bool = False
    has_output: bool = True
    structure: Mapping[str, Any] | None = None
    """The structured output that it asks for in the words of its protocol, as `structured_outputs` has it."""


@dataclass(frozen=True)
class ParserResponse:
    """The response to a body that needs no engine."""

    body: bytes
    """JSON."""
    warnings: tuple[str, ...] = ()
    """What the client sent and has no effect, in sentences."""


class RequestParser:
    """Makes requests of bodies, for one model."""

    def __init__(self, builder: RequestBuilder, names: Sequence[str], *, is_strict: bool = False):
        """`builder` checks requests against the model; `names` are what clients may call it, the first one foremost."""
        self.builder, self.names, self.is_strict = builder, tuple(names), is_strict
        self.config: EngineConfig = builder.config
        self.limits: Mapping[str, int | None] = builder.config.limits

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer; None for one that is served token ids alone."""
        return self.builder.encoder.tokenizer

    @property
    def max_model_len(self) -> int:
        """Return the longest sequence in tokens, prompt and output."""
        return self.builder.sizes.max_model_len

    @cached_property
    def counting_encoder(self) -> PromptEncoder:
        """Return the encoder of /tokenize: a text may have more tokens than the context, but no more characters."""
        return replace(self.builder.encoder, is_counting=True)

    def read_fields(self, body: bytearray, table: Mapping[str, BodyField]) -> TakenFields:
        """Return the fields of a body, sorted, for the model that it names. Raise HTTPError, or InvalidRequestError."""
        max_depth = self.limits["json_depth"]
        assert max_depth is not None
        value = parse_body(body, max_depth=max_depth, max_values=self.limits["json_values"])
        fields = take_fields(value, table, is_strict=self.is_strict)
        if fields.protocol.get("model", "") == "":  # Clients that have no name to give send an empty one.
            fields.protocol["model"] = self.names[0]
        self._check_model(fields.protocol["model"])
        return fields

    def _check_model(self, name: Any) -> None:
        """Raise HTTPError, a 404, for the name of no model that is served."""
        if not isinstance(name, str):
            raise refusal("model", told(name), f"a name: {', '.join(self.names)}")
        if name not in self.names:
            cut_name = name if name.isprintable() and len(name) <= 200 else shown(name)
            raise unknown_model(f"The model `{cut_name}` does not exist.")

    def tokenizer_for(self, name: str | None = None) -> Tokenizer:
        """Return the tokenizer; where there is none, refuse the request with its field `name`."""
        if self.tokenizer is None:
            fault = "the server has no tokenizer; send token ids to /v1/completions"
            raise InvalidRequestError(fault if name is None else f"{name}: {fault}", param=name)
        return self.tokenizer

    def request(
        self,
        fields: TakenFields,
        prompts: Sequence[Mapping[str, Any]],
        params: SamplingParams | BeamSearchParams,
        wanted: Wanted,
        places: Places | None = None,
    ) -> GenerationRequest:
        """Return the internal form of a request. `places` are the names that warnings about a chat have for its parts;
        None where the chat was sent as it is."""
        given = fields.protocol
        has_usage, has_continuous_usage = usage_of(given.get("stream_options"), is_stream=wanted.is_stream)
        new_requests = tuple(
            self._new_request({**prompt, **fields.prompt_options}, params, wanted) for prompt in prompts
        )
        self._note_formats(fields, params)
        self._note_unenforced(fields, new_requests, places or Places())
        return GenerationRequest(
            model=given["model"],
            new_requests=new_requests,
            num_samples=params.n,
            is_stream=wanted.is_stream,
            has_usage=has_usage,
            has_continuous_usage=has_continuous_usage,
            num_logprobs=wanted.num_logprobs,
            num_prompt_logprobs=fields.sampling.get("prompt_logprobs"),
            is_echoed=wanted.is_echoed,
            has_output=wanted.has_output,
            has_token_ids=check("return_token_ids", given.get("return_token_ids", False), boolean),
            has_tokens_as_ids=check(
                "return_tokens_as_token_ids", given.get("return_tokens_as_token_ids", False), boolean
            ),
            client_id=check("request_id", given.get("request_id"), or_none(_client_id)),
            warnings=tuple(fields.warnings),
        )

    def _new_request(
        self, prompt: Mapping[str, Any], params: SamplingParams | BeamSearchParams, wanted: Wanted
    ) -> NewRequest:
        """Return the core's request for one prompt. Raise InvalidRequestError if the output may not fit beside it."""
        num_kept = prompt.get("truncate_prompt_tokens")
        if num_kept == -1 and wanted.max_tokens is not None:  # As many as fit beside the output.
            prompt = {**prompt, "truncate_prompt_tokens": max(self.max_model_len - wanted.max_tokens, 1)}
        new = self.builder.build("", prompt, params, number=0)
        num_tokens = new.num_prompt_tokens
        if wanted.max_tokens is not None and num_tokens + wanted.max_tokens > self.max_model_len:
            got = (
                f"your prompt has {num_tokens} and {wanted.sent_names.get('max_tokens', 'max_tokens')} is "
                f"{told(wanted.max_tokens)}, {told(num_tokens + wanted.max_tokens)} together"
            )
            raise ContextLengthError.of(self.max_model_len, got, "lower one of them", param=wanted.sent_names["prompt"])
        # An echo shows what was kept of the prompt.
        text = new.prompt if num_kept is None else None
        return msgspec.structs.replace(new, is_streamed=wanted.is_stream, prompt=text, sent_names=wanted.sent_names)

    def _note_formats(self, fields: TakenFields, params: SamplingParams | BeamSearchParams) -> None:
        """Note a warning for formats of a schema that are not known; a strict server refuses them."""
        wanted = params.structured_outputs if isinstance(params, SamplingParams) else None
        formats = unenforced(wanted) if isinstance(wanted, StructuredOutputsParams) else []
        if formats and self.is_strict:
            way_out = "leave it out, or start the server without --strict"
            got = f"an unknown format at {formats[0].partition(' at ')[2]}"
            raise refusal("structured_outputs.json", got, "those in docs/structured_outputs.md", way_out)
        if formats:
            fields.warnings.append(f"formats that are not known are not enforced: {', '.join(formats)}")

    def _note_unenforced(self, fields: TakenFields, new_requests: Sequence[NewRequest], places: Places) -> None:
        """Note what is not enforced of tools' schemas and grammars; a strict server refuses it."""
        unenforced = list(dict.fromkeys(reason for new in new_requests for reason in new.unenforced))
        if unenforced and self.is_strict:
            way_out = "leave it out, or start the server without --strict"
            place, reason = unenforced[0].partition(" ")[0], unenforced[0].partition(": ")[2]
            raise refusal(place, reason, "what docs/structured_outputs.md lists", way_out)
        fields.warnings += map(places.reworded, unenforced)


def _client_id(value: Any) -> str:
    if not isinstance(value, str) or not CLIENT_ID.fullmatch(value):
        raise refusal("request_id", told(value), "1 to 128 printable ASCII characters without spaces")
    return value
