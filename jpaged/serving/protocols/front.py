"""Bodies of requests → requests of the core, checked: the server's front half, which runs off the event loop.

It holds a model's tokenizer and limits, and no engine: it can run in a process without a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from ...checks import boolean, check, check_name, integer, is_integer, or_none, refusal, shown
from ...config.engine_config import EngineConfig
from ...errors import InvalidRequestError
from ...intake.request_builder import RequestBuilder
from ...messages import NewRequest
from ...sampling.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from ...text.chat_messages import normalize_messages, without_developers
from ...text.tokenizer import Tokenizer
from .bodies import parse_body
from .fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
    BodyField,
    TakenFields,
    take_fields,
)
from .generation_request import GenerationRequest
from .replies import HTTPError

DEFAULT_COMPLETION_TOKENS = 16
"""Output tokens of /v1/completions where a body does not say, as OpenAI has it."""
MAX_CLIENT_ID_CHARS = 128


class Front:
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

    def completion(self, body: bytes) -> GenerationRequest:
        """Return the request that a body of /v1/completions asks for. Raise HTTPError or InvalidRequestError."""
        fields = self._fields(body, COMPLETION_FIELDS)
        route, sampling = fields.route, fields.sampling
        is_echoed = check("echo", route.get("echo", False), boolean)
        num_logprobs = check("logprobs", route.get("logprobs"), or_none(integer(-1)))
        max_tokens = check("max_tokens", route.get("max_tokens"), or_none(integer(0 if is_echoed else 1)))
        if is_echoed and num_logprobs is not None:
            sampling.setdefault("prompt_logprobs", num_logprobs)
        prompts = [{_key_of(prompt): prompt} for prompt in self._prompts(route.get("prompt"))]
        # The engine computes one token at least. The default is cut to what the context leaves; a client's number is
        # refused instead.
        num_computed = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max(max_tokens, 1)
        return self._request(
            fields,
            prompts,
            self._params(fields, num_computed, num_logprobs),
            max_tokens=max_tokens or None,
            num_logprobs=num_logprobs,
            is_echoed=is_echoed,
            has_output=max_tokens != 0,
        )

    def chat(self, body: bytes) -> GenerationRequest:
        """Return the request that a body of /v1/chat/completions asks for. Raise HTTPError or InvalidRequestError."""
        fields = self._fields(body, CHAT_FIELDS)
        route = fields.route
        if "messages" not in route:
            raise refusal("messages", "none", "a list of at least one message")
        if "max_tokens" in route and "max_completion_tokens" in route:
            raise refusal("max_tokens", "it and max_completion_tokens", "one of them", "leave max_tokens out")
        name = "max_tokens" if "max_tokens" in route else "max_completion_tokens"
        max_tokens = check(name, route.get(name), or_none(integer(1)))
        has_logprobs = check("logprobs", route.get("logprobs", False), boolean)
        num_tops = check("top_logprobs", route.get("top_logprobs", 0), integer(-1))
        if num_tops and not has_logprobs:
            raise refusal("top_logprobs", f"{num_tops} without logprobs", "0", "give logprobs: true too")
        self._take_effort(fields)
        num_logprobs = num_tops if has_logprobs else None
        params = self._params(fields, max_tokens, num_logprobs)
        prompts = [{"messages": self._for_template(route["messages"])}]
        return self._request(fields, prompts, params, max_tokens=max_tokens, num_logprobs=num_logprobs)

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """Return the tokens of a text or a chat, for /tokenize."""
        fields = self._fields(body, TOKENIZE_FIELDS)
        keys = [key for key in ("prompt", "messages") if key in fields.route]
        if len(keys) != 1:
            raise refusal("prompt", " and ".join(keys) or "none", "one of prompt and messages")
        if keys == ["prompt"] and not isinstance(fields.route["prompt"], str):
            raise refusal("prompt", shown(fields.route["prompt"]), "a text")
        tokenizer = self._tokenizer()
        if fields.route.get("prompt") == "":
            token_ids = tokenizer.encode("", add_special_tokens=fields.prompt.get("add_special_tokens") is not False)
        else:
            value = fields.route[keys[0]]
            prompt = {keys[0]: self._for_template(value) if keys == ["messages"] else value, **fields.prompt}
            token_ids = self.builder.encoder.encode(prompt, has_answer=False).token_ids
        result: dict[str, Any] = {"count": len(token_ids), "max_model_len": self.max_model_len, "tokens": token_ids}
        has_texts = check("return_token_strs", fields.route.get("return_token_strs", False), boolean)
        result["token_strs"] = [tokenizer.backend.id_to_token(one) for one in token_ids] if has_texts else None
        return result

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """Return the text of token ids, special tokens included, for /detokenize."""
        token_ids = self._fields(body, DETOKENIZE_FIELDS).route.get("tokens")
        if not isinstance(token_ids, list):
            raise refusal("tokens", shown(token_ids), "a list of token ids")
        if len(token_ids) > self.max_model_len:
            raise refusal("tokens", f"{len(token_ids)} tokens", f"at most the context length, {self.max_model_len}")
        size = self.builder.encoder.vocab_size
        for one in token_ids:
            if not is_integer(one) or not 0 <= one < size:
                raise refusal("tokens", f"{shown(one)} among the token ids", f"integers in [0, {size - 1}]")
        return {"prompt": self._tokenizer().decode(token_ids, skip_special_tokens=False)}

    def _for_template(self, messages: Any) -> Any:
        """Return messages in which the role developer is system, if the chat template does not know that role.

        Others are returned as they are, also malformed ones.
        """
        encoder = self.builder.encoder
        template = encoder.chat_template or (self.tokenizer and self.tokenizer.chat_template) or ""
        is_list = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
        if not is_list or "developer" in template or not any(one.get("role") == "developer" for one in messages):
            return messages
        return without_developers(normalize_messages(messages))

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise refusal("prompt", "a text", "token ids, since the server has no tokenizer")
        return self.tokenizer

    def _fields(self, body: bytes, table: Mapping[str, BodyField]) -> TakenFields:
        """Return the fields of a body, sorted, for the model that it names. Raise HTTPError, or InvalidRequestError."""
        depth = self.limits["json_depth"]
        assert depth is not None
        fields = take_fields(parse_body(body, max_depth=depth), table, is_strict=self.is_strict)
        self._check_model(fields.route.get("model", self.names[0]))
        return fields

    def _check_model(self, name: Any) -> None:
        """Raise HTTPError, a 404, for the name of no model that is served."""
        if not isinstance(name, str):
            raise refusal("model", shown(name), f"a name: {', '.join(self.names)}")
        if name not in self.names:
            shown_name = name if name.isprintable() and len(name) <= 200 else shown(name)
            raise HTTPError(404, f"The model `{shown_name}` does not exist.", param="model")

    def _prompts(self, value: Any) -> list[Any]:
        """Return the list of prompts in a body: one text, token ids, or a list of either kind."""
        if value is None or value in ("", []):
            raise refusal("prompt", "none" if value is None else shown(value), "a prompt that is not empty")
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise refusal("prompt", shown(value), "a text, a list of token ids, or a list of such prompts")
        if not any(isinstance(one, str | list) for one in value):
            return [value]
        most = self.limits["prompts"]
        if most is not None and len(value) > most:
            raise refusal("prompt", f"{len(value)} prompts", f"at most {most}", "send several requests")
        if not all(type(one) is type(value[0]) for one in value):
            raise refusal("prompt", "a list of prompts of several kinds", "texts alone, or lists of token ids alone")
        return value

    def _take_effort(self, fields: TakenFields) -> None:
        """Make `reasoning_effort` an argument of the chat template, which must read it."""
        effort = fields.route.get("reasoning_effort")
        if effort is None:
            return
        given = fields.prompt.setdefault("chat_template_kwargs", {})
        if not isinstance(given, dict) or "reasoning_effort" in given:
            got = "it and chat_template_kwargs with the same name"
            raise refusal("reasoning_effort", got, "one of them", "leave one out")
        given["reasoning_effort"] = check("reasoning_effort", effort, _effort)

    def _params(
        self, fields: TakenFields, max_tokens: int | None, num_logprobs: int | None
    ) -> SamplingParams | BeamSearchParams:
        """Return the parameters of the requests; what a body leaves out is as the model's generation config has it."""
        route, sampling = fields.route, fields.sampling
        if "response_format" in route:
            structure = _structure(route["response_format"])
            if structure is not None and "structured_outputs" in sampling:
                raise refusal("response_format", "it and structured_outputs", "one of them", "leave one out")
            if structure is not None:
                sampling["structured_outputs"] = structure
        n = route.get("n", 1)
        if check("use_beam_search", route.get("use_beam_search", False), boolean):
            return self._beams(fields, n, max_tokens, num_logprobs)
        if "length_penalty" in route and route["length_penalty"] != 1:
            raise refusal("length_penalty", shown(route["length_penalty"]), "1 without use_beam_search")
        is_stream = check("stream", route.get("stream", False), boolean)
        if is_stream and "prompt_logprobs" in sampling and not route.get("echo"):
            raise refusal("prompt_logprobs", "it and stream", "one of them", "leave stream out")
        kind = RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY
        given = {
            **self.builder.sampling_defaults,
            **sampling,
            "n": n,
            "max_tokens": max_tokens,
            "logprobs": num_logprobs,
        }
        return SamplingParams(**given, output_kind=kind, detokenize=self.tokenizer is not None)

    def _beams(self, fields: TakenFields, n: Any, max_tokens: int | None, num_logprobs: int | None) -> BeamSearchParams:
        """Return the parameters of a beam search, which takes few of the fields of sampling and is never a stream."""
        given = {name: fields.sampling.pop(name) for name in ("ignore_eos", "temperature") if name in fields.sampling}
        other = next(iter(fields.sampling), "logprobs" if num_logprobs is not None else None)
        other = "stream" if fields.route.get("stream") else other
        if other is not None:
            raise refusal(other, "it and use_beam_search", "one of them", "leave one out")
        penalty = fields.route.get("length_penalty", 1.0)
        return BeamSearchParams(beam_width=n, max_tokens=max_tokens, length_penalty=penalty, **given)

    def _request(
        self,
        fields: TakenFields,
        prompts: Sequence[Mapping[str, Any]],
        params: SamplingParams | BeamSearchParams,
        *,
        max_tokens: int | None,
        num_logprobs: int | None,
        is_echoed: bool = False,
        has_output: bool = True,
    ) -> GenerationRequest:
        """Return the internal form of a request; `max_tokens` is what the client has asked for, None if it has not."""
        route = fields.route
        is_stream = bool(route.get("stream", False))
        messages = tuple(self._message(prompt, fields, params, max_tokens, is_stream) for prompt in prompts)
        has_usage, has_continuous_usage = _stream_options(route.get("stream_options"), is_stream=is_stream)
        prompt_logprobs = fields.sampling.get("prompt_logprobs")
        client_id = check("request_id", route.get("request_id"), or_none(_client_id))
        return GenerationRequest(
            model=route.get("model", self.names[0]),
            messages=messages,
            num_samples=params.n,
            is_stream=is_stream,
            has_usage=has_usage,
            has_continuous_usage=has_continuous_usage,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=None if is_echoed else prompt_logprobs,
            is_echoed=is_echoed,
            has_output=has_output,
            has_token_ids=check("return_token_ids", route.get("return_token_ids", False), boolean),
            has_tokens_as_ids=check(
                "return_tokens_as_token_ids", route.get("return_tokens_as_token_ids", False), boolean
            ),
            client_id=client_id,
            warnings=tuple(fields.unknown),
        )

    def _message(
        self,
        prompt: Mapping[str, Any],
        fields: TakenFields,
        params: SamplingParams | BeamSearchParams,
        max_tokens: int | None,
        is_stream: bool,
    ) -> NewRequest:
        """Return the core's request for one prompt. Raise InvalidRequestError if the output may not fit beside it."""
        new = self.builder.build("", {**prompt, **fields.prompt}, params, number=0)
        num_tokens = len(new.prompt_token_ids) // 4
        if max_tokens is not None and num_tokens + max_tokens > self.max_model_len:
            message = (
                f"This model's maximum context length is {self.max_model_len} tokens, but your prompt has {num_tokens} "
                f"and max_tokens is {max_tokens}, {num_tokens + max_tokens} together; lower one of them"
            )
            raise InvalidRequestError(message, param="max_tokens")
        return msgspec.structs.replace(new, is_streamed=is_stream)


def _key_of(prompt: Any) -> str:
    return "prompt" if isinstance(prompt, str) else "prompt_token_ids"


def _effort(value: Any) -> str:
    check_name(value, ("none", "minimal", "low", "medium", "high", "xhigh"), "effort")
    return str(value)


def _client_id(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CLIENT_ID_CHARS or not value.isprintable():
        raise refusal("request_id", shown(value), f"1 to {MAX_CLIENT_ID_CHARS} printable characters")
    return value


def _stream_options(value: Any, *, is_stream: bool) -> tuple[bool, bool]:
    """Return whether a stream ends with its usage, and whether each event has it."""
    if value is None:
        return False, False
    if not is_stream:
        raise refusal("stream_options", "it without stream", "none", "give stream: true, or leave it out")
    if not isinstance(value, dict):
        raise refusal("stream_options", shown(value), "an object")
    known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
    for name, one in value.items():
        check_name(name, known, "key of stream_options")
        check(f"stream_options.{name}", one, or_none(boolean))
    has_continuous = bool(value.get("continuous_usage_stats"))
    return bool(value.get("include_usage")) or has_continuous, has_continuous


def _structure(value: Any) -> dict[str, Any] | None:
    """Return the structured output that a `response_format` asks for; None for plain text."""
    allowed = "an object with type text, json_object or json_schema"
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise refusal(
            "response_format", shown(value) if not isinstance(value, dict) else "an object without a type", allowed
        )
    kind = value["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise refusal("response_format.type", shown(kind), "text, json_object, json_schema")
    described = value.get("json_schema")
    if not isinstance(described, dict):
        raise refusal("response_format.json_schema", shown(described), "an object with name and schema")
    schema = described.get("schema")
    return {"json_object": True} if schema is None else {"json": schema}
