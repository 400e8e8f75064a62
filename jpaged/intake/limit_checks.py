"""Refuses parameters that exceed the limits of an engine, `EngineConfig.limits`.

`SamplingParams` itself refuses what exceeds the ceiling of a limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..checks import refusal
from ..limits import LIMITS
from ..sampling.sampling_params import SamplingParams
from ..structured_outputs import StructuredOutputsParams
from ..text.prompt_params import CheckedParams


def check_limits(checked: CheckedParams, limits: Mapping[str, int | None]) -> None:
    """Raise InvalidRequestError for parameters that ask for more than `limits`, those of an engine, allow."""
    for field, limit, count in _counts(checked):
        max_count = limits[limit]
        if max_count is not None and count > max_count:
            allowed = f"at most {max_count}, the engine's limit {limit}"
            raise refusal(field, f"{count} {LIMITS[limit].meaning}", allowed, "ask for less, or raise the limit")


def _counts(checked: CheckedParams) -> Iterator[tuple[str, str, int]]:
    """Yield (field, limit, how much of it is asked for) for each limit that parameters fall under."""
    params = checked.params
    if not isinstance(params, SamplingParams):
        yield "beam_width", "samples", params.n
        return
    yield "n", "samples", params.n
    stop, words = params.stop or (), params.bad_words or ()
    yield "stop", "stop", len(stop)
    yield "stop", "stop_chars", max(map(len, stop), default=0)
    yield "bad_words", "bad_words", len(words)
    yield "bad_words", "bad_word_tokens", sum(map(len, checked.bad_words))
    yield "logit_bias", "logit_bias", len(params.logit_bias or ())
    structure = params.structured_outputs
    if isinstance(structure, StructuredOutputsParams):
        for field in ("regex", "whitespace_pattern"):
            yield f"structured_outputs.{field}", "regex_bytes", len((getattr(structure, field) or "").encode())
        for field in ("json", "grammar"):
            text = getattr(structure, field)
            yield f"structured_outputs.{field}", "schema_bytes", len(text.encode()) if isinstance(text, str) else 0
        yield "structured_outputs.choice", "schema_bytes", len("\n".join(structure.choice or ()).encode())
