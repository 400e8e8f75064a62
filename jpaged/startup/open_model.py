"""Opens a model without its weights: config, tokenizer, sampling defaults.

All that can be wrong before weights are read is found here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .config import EngineConfig
from .errors import InvalidRequestError, ModelLoadError
from .model_source import ModelSource, read_generation_defaults, resolve_model
from .models.checkpoint import Checkpoint, GGUFCheckpoint, open_model
from .models.config import ModelConfig
from .sampling_params import SamplingParams
from .tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class OpenedModel:
    """A model whose headers have been read and found to belong together."""

    source: ModelSource
    config: ModelConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    sampling_defaults: dict[str, Any]
    """SamplingParams fields that the model's makers set."""
    eos_token_ids: frozenset[int]
    """Every id that ends a reply: the model config's, the generation config's and the tokenizer's."""


def open_for_engine(config: EngineConfig) -> OpenedModel:
    """Find and open the model of `config`. Raises ModelLoadError, naming the file and the way out."""
    source = resolve_model(config.model, revision=config.revision)
    model_config, checkpoint = open_model(source.path)
    tokenizer = load_tokenizer(source.path, checkpoint.file if isinstance(checkpoint, GGUFCheckpoint) else None)
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ModelLoadError(
            f"{source.path}: the tokenizer has {tokenizer.vocab_size} ids, the model's embedding "
            f"{model_config.vocab_size} rows; tokenizer and weights are of different models"
        )
    defaults = read_generation_defaults(source, only_eos=config.generation_config == "none")
    ids = {*model_config.eos_token_ids, *defaults.pop("eos_token_id", ())}
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return OpenedModel(source, model_config, checkpoint, tokenizer, _usable(defaults, source), frozenset(ids))


def _usable(defaults: dict[str, Any], source: ModelSource) -> dict[str, Any]:
    """The defaults, if they are in range."""
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelLoadError(
            f"{source.path}: its generation config is out of range: {error}; give --generation-config none"
        ) from error
    return defaults
