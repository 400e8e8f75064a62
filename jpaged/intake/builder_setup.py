"""What a RequestBuilder is made of, as plain values: the same one checks requests in processes without an engine."""

from __future__ import annotations

from typing import Any

import msgspec
import tokenizers

from ..config.engine_config import EngineConfig
from ..sampling.logit_rules_spec import LogitRulesSpec
from ..step.step_sizes import StepSizes
from ..text.grammar.grammar import Grammars
from ..text.prompts import PromptEncoder
from ..text.tokenizing.sentencepiece_tokenizer import SentencePieces
from ..text.tokenizing.tokenizer import Tokenizer
from .request_builder import RequestBuilder

CONFIG_FIELDS = ("model", "limits", "max_logprobs", "scheduling_policy", "logprobs_mode")
"""Options of the engine that a builder reads when it makes messages."""


class BuilderSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A builder of an engine without functions of the caller's: no processors of logits, no policy that is a function.

    It has no chat template but the model's own.
    """

    config: dict[str, Any]
    sizes: StepSizes
    sampling_defaults: dict[str, Any]
    vocab_size: int
    eos_token_ids: frozenset[int]
    tool_call_parser: str | None
    reasoning_parser: str | None
    tokenizer: str | None
    """The tokenizer as JSON of the package `tokenizers`; None for an engine without one."""
    sentence_pieces: SentencePieces | None = None
    """What splits its texts, if it was read from a file of SentencePiece; not part of that JSON."""
    splits_special_tokens: bool = False
    """Whether special tokens that a text spells out are plain text. That JSON does not say it."""
    special_tokens: dict[str, str] = {}
    tokenizer_template: str | None = None
    """The model's own chat template."""
    tool_template: str | None = None
    """Its own one for chats with tools."""
    response_template: Any = None
    """What its files say of its answers."""


def setup_of(builder: RequestBuilder) -> BuilderSetup:
    """Return what makes the same builder in another process. Takes up to half a second for a large vocabulary."""
    encoder = builder.encoder
    assert not encoder.rules_spec.processors, "processors are functions, which no other process can have"
    tokenizer = encoder.tokenizer
    return BuilderSetup(
        config={name: getattr(builder.config, name) for name in CONFIG_FIELDS},
        sizes=builder.sizes,
        sampling_defaults=dict(builder.sampling_defaults),
        vocab_size=encoder.vocab_size,
        eos_token_ids=encoder.eos_token_ids,
        tool_call_parser=encoder.tool_call_parser,
        reasoning_parser=encoder.reasoning_parser,
        tokenizer=None if tokenizer is None else tokenizer.to_json(),
        sentence_pieces=None if tokenizer is None else tokenizer.sentence_pieces,
        splits_special_tokens=tokenizer is not None and tokenizer.backend.encode_special_tokens,
        special_tokens={} if tokenizer is None else tokenizer.special_tokens,
        tokenizer_template=None if tokenizer is None else tokenizer.chat_template,
        tool_template=None if tokenizer is None else tokenizer.tool_template,
        response_template=None if tokenizer is None else tokenizer.response_template,
    )


def builder_of(setup: BuilderSetup, *, chat_template: str | None = None) -> RequestBuilder:
    """Return the builder that `setup_of` was given. `chat_template` replaces the model's own."""
    config, tokenizer, grammars = EngineConfig(**setup.config), None, None
    if setup.tokenizer is not None:
        backend = tokenizers.Tokenizer.from_str(setup.tokenizer)
        backend.encode_special_tokens = setup.splits_special_tokens
        tokenizer = Tokenizer(
            backend,
            setup.special_tokens,
            chat_template=setup.tokenizer_template,
            tool_template=setup.tool_template,
            sentence_pieces=setup.sentence_pieces,
            response_template=setup.response_template,
        )
        grammars = Grammars(tokenizer, setup.vocab_size, setup.eos_token_ids)
    encoder = PromptEncoder(
        tokenizer,
        LogitRulesSpec(setup.vocab_size, eos_token_ids=setup.eos_token_ids),
        setup.sizes.max_model_len,
        chat_template,
        config.limits,
        setup.eos_token_ids,
        grammars,
        setup.tool_call_parser,
        setup.reasoning_parser,
    )
    return RequestBuilder(config, encoder, setup.sizes, setup.sampling_defaults)
