"""Makes the parameters of requests of the fields of a body that say how tokens are drawn."""

from __future__ import annotations

from typing import Any

from ...checks import boolean, check, is_integer, refusal, told
from ...sampling.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from .fields import TakenFields
from .nested_options import schema_place
from .request_parser import RequestParser, Wanted


def params_of(
    parser: RequestParser, fields: TakenFields, wanted: Wanted, max_tokens: int | None
) -> SamplingParams | BeamSearchParams:
    """Return the parameters of the requests; what a body leaves out is as the model's generation config has it.

    `max_tokens` is the number of output tokens to compute at most, None for as many as the context leaves.
    """
    given = fields.protocol
    if check("use_beam_search", given.get("use_beam_search", False), boolean):
        return _beam_search(fields, wanted, max_tokens, has_structure=wanted.structure is not None)
    if given.get("length_penalty", 1) != 1:
        raise refusal("length_penalty", told(given["length_penalty"]), "1 without use_beam_search")
    if wanted.is_stream and "prompt_logprobs" in fields.sampling:
        raise refusal("prompt_logprobs", "it and stream", "one of them", "leave stream out")
    if parser.tokenizer is None and (stop := fields.sampling.get("stop")):
        raise refusal("stop", told(stop), "none, since the server has no tokenizer", "give stop_token_ids")
    values = {**parser.builder.sampling_defaults, **fields.sampling}
    if wanted.is_echoed and wanted.num_logprobs is not None:
        values["prompt_logprobs"] = _most_logprobs(wanted.num_logprobs, values.get("prompt_logprobs"))
    if wanted.structure is not None and "structured_outputs" in values:
        raise refusal("response_format", "it and structured_outputs", "one of them", "leave one out")
    if wanted.structure is not None:
        values["structured_outputs"] = wanted.structure
    return SamplingParams(
        **values,
        n=given.get("n", 1),
        max_tokens=max_tokens,
        logprobs=wanted.num_logprobs,
        output_kind=RequestOutputKind.DELTA if wanted.is_stream else RequestOutputKind.FINAL_ONLY,
        detokenize=parser.tokenizer is not None,
    )


def sent_names(fields: TakenFields, prompt_name: str) -> dict[str, str]:
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


def _most_logprobs(num_echoed: int, num_asked: Any) -> Any:
    """Return how many logprobs of a prompt are computed where both an echo and a client ask for some; -1 is all."""
    if num_asked is None or not is_integer(num_asked):
        return num_echoed if num_asked is None else num_asked  # What is no number is refused later.
    return -1 if -1 in (num_echoed, num_asked) else max(num_echoed, num_asked)


def _beam_search(
    fields: TakenFields, wanted: Wanted, max_tokens: int | None, *, has_structure: bool
) -> BeamSearchParams:
    """Return the parameters of a beam search, which takes few of the fields of sampling and is never a stream."""
    known = {name: value for name, value in fields.sampling.items() if name in ("ignore_eos", "temperature")}
    refused_names = [name for name in fields.sampling if name not in known]
    refused_names += ["logprobs"] * (wanted.num_logprobs is not None) + ["stream"] * wanted.is_stream
    refused_names += ["response_format"] * has_structure + ["tools"] * bool(fields.prompt_options.get("tools"))
    if refused_names:
        raise refusal(refused_names[0], "it and use_beam_search", "one of them", "leave one out")
    penalty = fields.protocol.get("length_penalty", 1.0)
    return BeamSearchParams(
        beam_width=fields.protocol.get("n", 1), max_tokens=max_tokens, length_penalty=penalty, **known
    )
