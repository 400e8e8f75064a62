"""Opens a model without its weights: config, tensor headers, tokenizer, sampling defaults.

Every fault of a model that can be found before its weights are read is found here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..config import EngineConfig
from ..errors import InvalidRequestError, ModelLoadError
from ..models.config.decoder import DecoderConfig
from ..models.config.spec import ModelSpec
from ..models.io.checkpoint import Checkpoint
from ..models.io.files import check_manifest
from ..models.io.gguf_checkpoint import GGUFCheckpoint
from ..models.io.open_checkpoint import open_checkpoint, read_config
from ..sampling.logit_rules_spec import LogitRulesSpec
from ..sampling.sampling_params import SamplingParams
from ..text.prompts import PromptEncoder
from ..text.tokenizer import TOKENIZER_FILES, Tokenizer, has_tokenizer, load_tokenizer
from .model_source import ModelSource, read_generation_defaults, resolve_model, resolve_tokenizer

logger = logging.getLogger("jpaged")


@dataclass(frozen=True)
class ModelHandle:
    """A model whose config, tensor headers and tokenizer have been read and belong together."""

    source: ModelSource
    config: DecoderConfig
    checkpoint: Checkpoint | None
    """None with random weights (`load_format` dummy), and in an engine, whose weights are loaded."""
    tokenizer: Tokenizer | None
    """None with `skip_tokenizer_init`, and where neither weights nor a tokenizer are read from the directory."""
    sampling_defaults: dict[str, Any]
    """SamplingParams fields that the model's generation config, or its model card, sets."""
    eos_token_ids: frozenset[int]
    """All token ids that end a reply: those of the model config, the generation config and the tokenizer."""

    @property
    def spec(self) -> ModelSpec:
        """Return what the engine reads of the model."""
        return self.config.spec

    def for_context(self, max_model_len: int) -> ModelHandle:
        """Return the model as it serves sequences of at most so many tokens; say which set of factors it takes."""
        config = self.config.for_context(max_model_len)
        for rope in {rope for rope in config.ropes if rope is not None and rope.kind == "longrope"}:
            kind, limit = "long" if rope.is_long else "short", rope.original_max_position
            logger.info(
                "rotary embedding: the %s factors, for contexts %s %s tokens; max_model_len is %s",
                kind,
                "beyond" if rope.is_long else "of up to",
                limit,
                max_model_len,
            )
        return replace(self, config=config)

    def prompt_encoder(
        self, config: EngineConfig, rules_spec: LogitRulesSpec, max_model_len: int, chat_template: str | None = None
    ) -> PromptEncoder:
        """Return what encodes and checks prompts for this model under the limits of `config`."""
        limit = config.limits["waiting_tokens"]
        return PromptEncoder(self.tokenizer, rules_spec, max_model_len, chat_template, limit, self.eos_token_ids)


def open_model(config: EngineConfig) -> ModelHandle:
    """Find and open the model of `config`. Raises ModelLoadError, naming the file and the way out."""
    is_read = config.load_format != "dummy" and config.params is None
    source = resolve_model(config.model, revision=config.revision, load_format=config.load_format, with_weights=is_read)
    check_manifest(source.directory, partial(source.reads, with_weights=is_read))
    checkpoint: Checkpoint | None = None
    if config.load_format == "dummy":
        model_config = read_config(source.path, config.hf_overrides)
    else:
        model_config, checkpoint = open_checkpoint(
            source.path, orbax=source.orbax, params=config.params, overrides=config.hf_overrides
        )
    tokenizer = _open_tokenizer(config, source, checkpoint)
    if tokenizer is not None and tokenizer.vocab_size > model_config.vocab_size:
        raise ModelLoadError(
            f"{config.tokenizer or source.path}: the tokenizer has {tokenizer.vocab_size} ids, the model's embedding "
            f"{model_config.vocab_size} rows; tokenizer and weights belong to different models"
        )
    defaults = read_generation_defaults(source, only_eos=config.generation_config == "none")
    ids = {*model_config.eos_token_ids, *defaults.pop("eos_token_id", ())}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        fault = f"its generation config is out of range: {error}"
        raise ModelLoadError(f"{source.path}: {fault}; give --generation-config none") from error
    return ModelHandle(source, model_config, checkpoint, tokenizer, defaults, frozenset(ids))


def _open_tokenizer(config: EngineConfig, source: ModelSource, checkpoint: Checkpoint | None) -> Tokenizer | None:
    """Return the tokenizer that serves; None if there is to be none, or no weights and no tokenizer are read."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        path = resolve_tokenizer(config.tokenizer)
        if not has_tokenizer(path):
            wanted = f"one of {', '.join(TOKENIZER_FILES)}: give a tokenizer's directory"
            raise ModelLoadError(f"tokenizer {config.tokenizer!r}: the directory has no tokenizer, wanted {wanted}")
        return load_tokenizer(path)
    is_optional = config.load_format == "dummy" or config.params is not None
    if is_optional and not has_tokenizer(source.path):
        return None
    return load_tokenizer(source.path, checkpoint.file if isinstance(checkpoint, GGUFCheckpoint) else None)
