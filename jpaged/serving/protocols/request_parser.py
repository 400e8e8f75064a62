"""Parses the bodies of requests into checked requests of the core: the server's front half, off the event loop.

It holds a model's tokenizer and limits, and no engine: it can run in a process without a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from ...checks import (
    boolean,
    check,
    integer,
    is_integer,
    one_line,
    one_of,
    or_none,
    refusal,
    sent_as,
    shown,
    shown_name,
    told,
)
from ...config.engine_config import EngineConfig
from ...errors import ContextLengthError, InvalidRequestError
from ...intake.request_builder import RequestBuilder
from ...json_lines import encode_json
from ...messages import NewRequest
from ...sampling.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from ...structured_outputs import StructuredOutputsParams
from ...text.chat.chat_messages import normalize_messages, without_developers
from ...text.chat.chat_template import readable_arguments
from ...text.chat.thinking import may_think
from ...text.grammar.grammar import unenforced
from ...text.prompts import PromptEncoder, PromptOptions, template_kwargs
from ...text.tokenizing.tokenizer import Tokenizer
from .bodies import parse_body
from .fields import (
    CHAT_FIELDS,
    CLIENT_ID,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    MAX_WARNED,
    TOKENIZE_FIELDS,
    BodyField,
    TakenFields,
    take_fields,
)
from .generation_request import GenerationRequest
from .http_errors import unknown_model
from .nested_options import schema_place, structure_of, usage_of

EFFORT = one_of("none", "minimal", "low", "medium", "high", "xhigh")
MAX_READABLE_CHARS = 300
"""Characters of the list of template variables in a warning or an error."""
DEFAULT_COMPLETION_TOKENS = 16
"""Output tokens of /v1/completions where a body does not say, as OpenAI has it."""


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What a body asks for beside its prompts and how tokens are drawn."""

    max_tokens: int | None
    """Output tokens that the client has asked for; None if it has not."""
    num_logprobs: int | None
    is_stream: bool
    sent_names: Mapping[str, str]
    """Fields of the engine → how the body calls them, where that differs; see `checks.sent_as`."""
    is_echoed: bool = False
    has_output: bool = True


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
    def tokenizer_info(self) -> dict[str, Any]:
        """Return what /tokenizer_info tells: special tokens and chat template, as tokenizer_config.json does."""
        tokenizer = self._tokenizer()
        encoder = self.builder.encoder
        return {
            "tokenizer_class": type(tokenizer).__name__,
            **tokenizer.special_tokens,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "eos_token_ids": sorted(encoder.eos_token_ids),
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": self.max_model_len,
            "chat_template": encoder.chat_template or tokenizer.chat_template,
        }

    @cached_property
    def _counting_encoder(self) -> PromptEncoder:
        """Return the encoder of /tokenize: a text may have more tokens than the context, but no more characters."""
        return replace(self.builder.encoder, is_counting=True)

    def parse_completion(self, body: bytearray) -> GenerationRequest:
        """Return the request that a body of /v1/completions asks for. Raise HTTPError or InvalidRequestError."""
        fields = self._fields(body, COMPLETION_FIELDS)
        given = fields.protocol
        is_echoed = check("echo", given.get("echo", False), boolean)
        num_logprobs = check("logprobs", given.get("logprobs"), or_none(integer(-1)))
        max_tokens = check("max_tokens", given.get("max_tokens"), or_none(integer(0 if is_echoed else 1)))
        prompts = [{_key_of(prompt): prompt} for prompt in self._prompts(given.get("prompt"))]
        wanted = _Wanted(
            max_tokens=max_tokens or None,
            num_logprobs=num_logprobs,
            is_stream=check("stream", given.get("stream", False), boolean),
            is_echoed=is_echoed,
            has_output=max_tokens != 0,
            sent_names=_sent_names(fields, "prompt"),
        )
        # None: the default, cut to what the context leaves. 0: one token is computed, as always, and not shown. Others
        # are refused if they do not fit.
        num_computed = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max(max_tokens, 1)
        with sent_as(wanted.sent_names):
            return self._request(fields, prompts, self._params(fields, wanted, num_computed), wanted)

    def parse_chat(self, body: bytearray) -> GenerationRequest:
        """Return the request that a body of /v1/chat/completions asks for. Raise HTTPError or InvalidRequestError."""
        fields = self._fields(body, CHAT_FIELDS)
        given = fields.protocol
        if "messages" not in given:
            raise refusal("messages", "none", "a list of at least one message")
        if "max_tokens" in given and "max_completion_tokens" in given:
            raise refusal("max_tokens", "it and max_completion_tokens", "one of them", "leave max_tokens out")
        max_tokens_name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        max_tokens = check(max_tokens_name, given.get(max_tokens_name), or_none(integer(1)))
        has_logprobs = check("logprobs", given.get("logprobs", False), boolean)
        num_logprobs = check("top_logprobs", given.get("top_logprobs", 0), integer(-1))
        if num_logprobs and not has_logprobs:
            raise refusal("top_logprobs", f"{num_logprobs} without logprobs", "0", "give logprobs: true too")
        sent_names = {**_sent_names(fields, "messages"), "max_tokens": max_tokens_name}
        if "top_logprobs" in given:
            sent_names["logprobs"] = "top_logprobs"
        wanted = _Wanted(
            max_tokens=max_tokens,
            num_logprobs=num_logprobs if has_logprobs else None,
            is_stream=check("stream", given.get("stream", False), boolean),
            sent_names=sent_names,
        )
        self._take_template_arguments(fields)
        prompts = [{"messages": self._for_template(given["messages"])}]
        with sent_as(wanted.sent_names):
            return self._request(fields, prompts, self._params(fields, wanted, max_tokens), wanted)

    def tokenize(self, body: bytearray) -> ParserResponse:
        """Return the response of /tokenize: the tokens of a text or a chat."""
        fields = self._fields(body, TOKENIZE_FIELDS)
        keys = [key for key in ("prompt", "messages") if key in fields.protocol]
        if len(keys) != 1:
            raise refusal("prompt", " and ".join(keys) or "none", "one of prompt and messages")
        if keys == ["prompt"] and not isinstance(fields.protocol["prompt"], str):
            raise refusal("prompt", told(fields.protocol["prompt"]), "a text")
        tokenizer = self._tokenizer(keys[0])
        if keys == ["messages"]:
            self._take_template_arguments(fields)
        if fields.protocol.get("prompt") == "":
            adds = PromptOptions.of(fields.prompt_options, "prompt").add_special_tokens
            token_ids = tokenizer.encode("", add_special_tokens=adds is not False)
        else:
            value = fields.protocol[keys[0]]
            prompt = {keys[0]: self._for_template(value) if keys == ["messages"] else value, **fields.prompt_options}
            token_ids = self._counting_encoder.encode(prompt, has_answer=False).token_ids
        result: dict[str, Any] = {"count": len(token_ids), "max_model_len": self.max_model_len, "tokens": token_ids}
        has_texts = check("return_token_strs", fields.protocol.get("return_token_strs", False), boolean)
        result["token_strs"] = [tokenizer.backend.id_to_token(one) for one in token_ids] if has_texts else None
        return ParserResponse(encode_json(result), tuple(fields.warnings))

    def detokenize(self, body: bytearray) -> ParserResponse:
        """Return the response of /detokenize: the text of token ids, special tokens included."""
        fields = self._fields(body, DETOKENIZE_FIELDS)
        token_ids = fields.protocol.get("tokens")
        if not isinstance(token_ids, list):
            raise refusal("tokens", told(token_ids), "a list of token ids")
        if len(token_ids) > self.max_model_len:
            got, way_out = f"tokens has {len(token_ids)}", "send fewer at once"
            raise ContextLengthError.of(self.max_model_len, got, way_out, param="tokens")
        size = self.builder.encoder.vocab_size
        for one in token_ids:
            if not is_integer(one) or not 0 <= one < size:
                raise refusal("tokens", f"{told(one)} among the token ids", f"integers in [0, {size - 1}]")
        text = self._tokenizer("tokens").decode(token_ids, skip_special_tokens=False)
        return ParserResponse(encode_json({"prompt": text}), tuple(fields.warnings))

    def _take_template_arguments(self, fields: TakenFields) -> None:
        """Make `chat_template_kwargs` the variables of a chat that its template reads, `reasoning_effort` among them.

        Of others a warning is noted, and a strict server refuses them. An effort of "none" is what a model without
        thoughts makes in any case, so it needs neither; nor does a variable that is null.
        """
        arguments, effort = _template_arguments(fields), fields.protocol.get("reasoning_effort")
        if not arguments:
            return
        template = self.builder.encoder.template
        known = readable_arguments(template)
        unread = [name for name, value in arguments.items() if name not in known and value is not None]
        thinks = self.tokenizer is not None and may_think(self.tokenizer, template)
        if effort == "none" and "reasoning_effort" in unread and not thinks:
            unread.remove("reasoning_effort")
        fields.prompt_options["chat_template_kwargs"] = {
            name: value for name, value in arguments.items() if name in known
        }
        if not unread:
            return
        names = ", ".join(map(shown_name, unread[:MAX_WARNED]))
        readable = one_line(", ".join(sorted(known)) or "nothing", MAX_READABLE_CHARS)
        if self.is_strict:
            is_effort = effort is not None and unread == ["reasoning_effort"]
            name = "reasoning_effort" if is_effort else "chat_template_kwargs"
            way_out = "leave it out, or start the server without --strict"
            raise refusal(name, "it" if is_effort else names, f"what the chat template reads: {readable}", way_out)
        fields.warnings.append(f"the chat template does not read {names}, left out; it reads: {readable}")

    def _for_template(self, messages: Any) -> Any:
        """Return messages in which the role developer is system, if the chat template does not know that role.

        Others are returned as they are, also malformed ones.
        """
        is_list = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
        if not is_list or "developer" in self.builder.encoder.template:
            return messages
        if not any(one.get("role") == "developer" for one in messages):
            return messages
        return without_developers(normalize_messages(messages))

    def _tokenizer(self, name: str | None = None) -> Tokenizer:
        """Return the tokenizer; where there is none, refuse the request with its field `name`."""
        if self.tokenizer is None:
            fault = "the server has no tokenizer; send token ids to /v1/completions"
            raise InvalidRequestError(fault if name is None else f"{name}: {fault}", param=name)
        return self.tokenizer

    def _fields(self, body: bytearray, table: Mapping[str, BodyField]) -> TakenFields:
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

    def _prompts(self, value: Any) -> list[Any]:
        """Return the list of prompts in a body: one text, token ids, or a list of either kind."""
        if value is None or value in ("", []):
            raise refusal("prompt", "none" if value is None else told(value), "a prompt that is not empty")
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise refusal("prompt", told(value), "a text, a list of token ids, or a list of such prompts")
        if not any(isinstance(one, str | list) for one in value):
            return [value]
        max_prompts = self.limits["prompts"]
        if max_prompts is not None and len(value) > max_prompts:
            raise refusal("prompt", f"{len(value)} prompts", f"at most {max_prompts}", "send several requests")
        if not all(type(one) is type(value[0]) for one in value):
            raise refusal("prompt", "a list of prompts of several kinds", "texts alone, or lists of token ids alone")
        return value

    def _params(
        self, fields: TakenFields, wanted: _Wanted, max_tokens: int | None
    ) -> SamplingParams | BeamSearchParams:
        """Return the parameters of the requests; what a body leaves out is as the model's generation config has it.

        `max_tokens` is the number of output tokens to compute at most, None for as many as the context leaves.
        """
        given = fields.protocol
        structure = structure_of(given["response_format"]) if "response_format" in given else None
        if check("use_beam_search", given.get("use_beam_search", False), boolean):
            return _beam_search(fields, wanted, max_tokens, has_structure=structure is not None)
        if given.get("length_penalty", 1) != 1:
            raise refusal("length_penalty", told(given["length_penalty"]), "1 without use_beam_search")
        if wanted.is_stream and "prompt_logprobs" in fields.sampling:
            raise refusal("prompt_logprobs", "it and stream", "one of them", "leave stream out")
        if self.tokenizer is None and (stop := fields.sampling.get("stop")):
            raise refusal("stop", told(stop), "none, since the server has no tokenizer", "give stop_token_ids")
        values = {**self.builder.sampling_defaults, **fields.sampling}
        if wanted.is_echoed and wanted.num_logprobs is not None:
            values["prompt_logprobs"] = _most_logprobs(wanted.num_logprobs, values.get("prompt_logprobs"))
        if structure is not None and "structured_outputs" in values:
            raise refusal("response_format", "it and structured_outputs", "one of them", "leave one out")
        if structure is not None:
            values["structured_outputs"] = structure
        return SamplingParams(
            **values,
            n=given.get("n", 1),
            max_tokens=max_tokens,
            logprobs=wanted.num_logprobs,
            output_kind=RequestOutputKind.DELTA if wanted.is_stream else RequestOutputKind.FINAL_ONLY,
            detokenize=self.tokenizer is not None,
        )

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

    def _request(
        self,
        fields: TakenFields,
        prompts: Sequence[Mapping[str, Any]],
        params: SamplingParams | BeamSearchParams,
        wanted: _Wanted,
    ) -> GenerationRequest:
        """Return the internal form of a request."""
        given = fields.protocol
        has_usage, has_continuous_usage = usage_of(given.get("stream_options"), is_stream=wanted.is_stream)
        new_requests = tuple(
            self._new_request({**prompt, **fields.prompt_options}, params, wanted) for prompt in prompts
        )
        self._note_formats(fields, params)
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
        self, prompt: Mapping[str, Any], params: SamplingParams | BeamSearchParams, wanted: _Wanted
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


def _most_logprobs(num_echoed: int, num_asked: Any) -> Any:
    """Return how many logprobs of a prompt are computed where both an echo and a client ask for some; -1 is all."""
    if num_asked is None or not is_integer(num_asked):
        return num_echoed if num_asked is None else num_asked  # What is no number is refused later.
    return -1 if -1 in (num_echoed, num_asked) else max(num_echoed, num_asked)


def _sent_names(fields: TakenFields, prompt_name: str) -> dict[str, str]:
    """Return how a body calls fields that the engine has under other names, the field of its prompts among them."""
    names = {"prompt": prompt_name, "prompt_token_ids": prompt_name}
    if fields.protocol.get("use_beam_search") is True:
        names["beam_width"] = "n"
    if "prompt_logprobs" not in fields.sampling:  # An echo has asked for them.
        names["prompt_logprobs"] = "logprobs"
    if "response_format" in fields.protocol and "structured_outputs" not in fields.sampling:
        names["structured_outputs"] = "response_format"
        names["structured_outputs.json"] = schema_place(fields.protocol["response_format"])
    return names


def _template_arguments(fields: TakenFields) -> dict[str, Any]:
    """Return the variables that a body sets for the chat template, `reasoning_effort` among them."""
    given = fields.prompt_options.get("chat_template_kwargs", {})
    arguments: dict[str, Any] = check("chat_template_kwargs", given, template_kwargs)
    effort = check("reasoning_effort", fields.protocol.get("reasoning_effort"), or_none(EFFORT))
    if effort is None:
        return arguments
    if "reasoning_effort" in arguments:
        got = "it and chat_template_kwargs with the same name"
        raise refusal("reasoning_effort", got, "one of them", "leave one out")
    return arguments | {"reasoning_effort": effort}


def _key_of(prompt: Any) -> str:
    """Return the key of a prompt in the mapping that the engine takes."""
    return "prompt" if isinstance(prompt, str) else "prompt_token_ids"


def _client_id(value: Any) -> str:
    if not isinstance(value, str) or not CLIENT_ID.fullmatch(value):
        raise refusal("request_id", told(value), "1 to 128 printable ASCII characters without spaces")
    return value


def _beam_search(
    fields: TakenFields, wanted: _Wanted, max_tokens: int | None, *, has_structure: bool
) -> BeamSearchParams:
    """Return the parameters of a beam search, which takes few of the fields of sampling and is never a stream."""
    known = {name: value for name, value in fields.sampling.items() if name in ("ignore_eos", "temperature")}
    refused_names = [name for name in fields.sampling if name not in known]
    refused_names += ["logprobs"] * (wanted.num_logprobs is not None) + ["stream"] * wanted.is_stream
    refused_names += ["response_format"] * has_structure
    if refused_names:
        raise refusal(refused_names[0], "it and use_beam_search", "one of them", "leave one out")
    penalty = fields.protocol.get("length_penalty", 1.0)
    return BeamSearchParams(
        beam_width=fields.protocol.get("n", 1), max_tokens=max_tokens, length_penalty=penalty, **known
    )
