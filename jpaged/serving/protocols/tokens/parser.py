"""Reads the bodies of /tokenize and /detokenize, and answers them."""

from __future__ import annotations

from typing import Any

from ....checks import boolean, check, is_integer, refusal, told
from ....errors import ContextLengthError
from ....json_lines import encode_json
from ....text.prompts import PromptOptions
from ..places import Places
from ..request_parser import ParserResponse, RequestParser
from ..template_arguments import take_template_arguments
from .fields import DETOKENIZE_FIELDS, TOKENIZE_FIELDS


def tokenize(parser: RequestParser, body: bytearray) -> ParserResponse:
    """Return the response of /tokenize: the tokens of a text or a chat."""
    fields = parser.read_fields(body, TOKENIZE_FIELDS)
    keys = [key for key in ("prompt", "messages") if key in fields.protocol]
    if len(keys) != 1:
        raise refusal("prompt", " and ".join(keys) or "none", "one of prompt and messages")
    if keys == ["prompt"] and not isinstance(fields.protocol["prompt"], str):
        raise refusal("prompt", told(fields.protocol["prompt"]), "a text")
    tokenizer = parser.tokenizer_for(keys[0])
    if keys == ["messages"]:
        take_template_arguments(parser, fields)
    if fields.protocol.get("prompt") == "":
        adds = PromptOptions.of(fields.prompt_options, "prompt").add_special_tokens
        token_ids = tokenizer.encode("", add_special_tokens=adds is not False)
    else:
        value = fields.protocol[keys[0]]
        prompt = {keys[0]: value, **fields.prompt_options}
        with Places().named():
            token_ids = parser.counting_encoder.encode(prompt, has_answer=False).token_ids
    result: dict[str, Any] = {"count": len(token_ids), "max_model_len": parser.max_model_len, "tokens": token_ids}
    has_texts = check("return_token_strs", fields.protocol.get("return_token_strs", False), boolean)
    result["token_strs"] = [tokenizer.backend.id_to_token(one) for one in token_ids] if has_texts else None
    return ParserResponse(encode_json(result), tuple(fields.warnings))


def detokenize(parser: RequestParser, body: bytearray) -> ParserResponse:
    """Return the response of /detokenize: the text of token ids, special tokens included."""
    fields = parser.read_fields(body, DETOKENIZE_FIELDS)
    token_ids = fields.protocol.get("tokens")
    if not isinstance(token_ids, list):
        raise refusal("tokens", told(token_ids), "a list of token ids")
    if len(token_ids) > parser.max_model_len:
        got, way_out = f"tokens has {len(token_ids)}", "send fewer at once"
        raise ContextLengthError.of(parser.max_model_len, got, way_out, param="tokens")
    size = parser.builder.encoder.vocab_size
    for one in token_ids:
        if not is_integer(one) or not 0 <= one < size:
            raise refusal("tokens", f"{told(one)} among the token ids", f"integers in [0, {size - 1}]")
    text = parser.tokenizer_for("tokens").decode(token_ids, skip_special_tokens=False)
    return ParserResponse(encode_json({"prompt": text}), tuple(fields.warnings))


def tokenizer_info(parser: RequestParser) -> dict[str, Any]:
    """Return what /tokenizer_info tells: special tokens and chat template, as tokenizer_config.json does."""
    tokenizer = parser.tokenizer_for()
    encoder = parser.builder.encoder
    return {
        "tokenizer_class": type(tokenizer).__name__,
        **tokenizer.special_tokens,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "eos_token_ids": sorted(encoder.eos_token_ids),
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": parser.max_model_len,
        "chat_template": encoder.chat_template or tokenizer.chat_template,
    }
