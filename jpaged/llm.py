"""`LLM`: the offline engine under vLLM's name and method names, for scripts that move over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .engine import Engine
from .outputs import RequestOutput
from .sampling_params import BeamSearchParams, SamplingParams
from .tokenizer import Tokenizer


class LLM:
    """`LLM(model).generate(prompts, sampling_params)`; the options are those of `EngineConfig`."""

    def __init__(self, model: str, **options: Any):
        self.engine = Engine(model, **options)

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """As `Engine.generate`."""
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "priority": priority, "on_error": on_error}
        return self.engine.generate(prompts, sampling_params, **options)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """As `Engine.chat`."""
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "priority": priority, "on_error": on_error}
        return self.engine.chat(messages, sampling_params, **options)

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """As `Engine.beam_search`."""
        options: dict[str, Any] = {"use_tqdm": use_tqdm, "priority": priority, "on_error": on_error}
        return self.engine.beam_search(prompts, params, **options)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend."""
        return self.engine.default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def shutdown(self) -> None:
        """Free the device."""
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.engine.reset_prefix_cache()
