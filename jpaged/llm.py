"""`LLM`: the engine under the names that scripts for vLLM use."""

from __future__ import annotations

from typing import Any

from .engine import Engine
from .sampling.sampling_params import SamplingParams
from .text.tokenizing.tokenizer import Tokenizer


class LLM(Engine):
    """An `Engine` whose constructor and default accessors have vLLM's names.

    `LLM(model).generate(prompts, sampling_params)`. Everything else is as in `Engine`.
    """

    def __init__(self, model: str, **options: Any):
        """Load a model; `model` and `options` are those of `Engine`, but a model must be named."""
        super().__init__(model, **options)

    @property
    def engine(self) -> Engine:
        """Return the engine itself, for scripts that drive it step by step."""
        return self

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model's generation config recommends, like `Engine.default_sampling_params`."""
        return self.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer; None for an engine without one."""
        return self.tokenizer
