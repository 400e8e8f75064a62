"""Chooses which executables are compiled at start, and in which order.

With `warmup=lazy`, those that the known requests need first are compiled while the weights are read, and others after
the first step. On a CPU only what is known to be needed is compiled ahead: the compiler takes the cores that compute
steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..config.engine_config import EngineConfig
from ..sampling.sampling_params import SampleMode
from ..scheduling.buckets import filled_tokens
from ..step.compile_plan import Key
from ..step.programs import ALLOCATE_KEY, Programs, decode_key, forward_key, sample_key
from ..step.step_inputs import StepInputBuilder
from .sizing.sizes import Demand

LONG_STEP = 1024
"""Tokens of a step from which on its forward program is compiled before the programs that decode."""


def warmup_keys(
    config: EngineConfig,
    programs: Programs,
    builder: StepInputBuilder,
    demands: Sequence[Demand],
    modes: Collection[SampleMode],
    *,
    is_cpu: bool,
) -> tuple[list[Key], list[Key]]:
    """Return the keys to compile while the weights are read, and those to compile after the first step.

    `demands` and `modes` are the known requests and their sampling modes; both empty if they are not known.
    """
    everything = _by_need(programs.lower)
    if config.warmup == "full":
        return everything, []
    if config.warmup == "off":
        return [], []
    if not demands:
        return [], [] if is_cpu else everything
    buckets = builder.buckets
    num_seqs = min(sum(demand.num_samples for demand in demands), builder.sizes.max_num_seqs)
    samplers = dict.fromkeys(sample_key(buckets, num_seqs, mode) for mode in modes)
    decodes = [decode_key(buckets, num_seqs, mode) for mode in modes]
    decodes.append(forward_key(buckets, num_seqs, decodes_only=True))
    deferred = [key for key in dict.fromkeys(decodes) if key in programs.lower]
    return [*_prompt_keys(config, builder, demands), *samplers], deferred if is_cpu else [*deferred, *everything]


def _by_need(keys: Iterable[Key]) -> list[Key]:
    """Return the keys in the order in which unknown requests are likely to need them.

    A first prompt comes, long or short: the largest forward programs, which also take longest to compile; then the
    samplers and decode programs for few rows and for more; then the smaller forwards, and what moves pages.
    """

    def need(key: Any) -> tuple[int, int]:
        name, size = key[0], key[1] if len(key) > 1 else 0
        if name == "forward":
            return (1, -size) if size >= LONG_STEP else (3, -size)
        return (2, size) if size else (0 if key == ALLOCATE_KEY else 4, 0)

    return sorted(keys, key=need)


def _prompt_keys(config: EngineConfig, builder: StepInputBuilder, demands: Sequence[Demand]) -> dict[Key, None]:
    """Return the forward programs that the first token waits for, in order.

    A single prompt waits for the steps of all of its chunks; of several prompts only the first step is known.
    """
    buckets, max_tokens = builder.buckets, builder.sizes.max_num_batched_tokens
    num_left = sum(demand.prompt_len for demand in demands)
    if len(demands) == 1 and config.enable_chunked_prefill:
        max_tokens = min(max_tokens, config.long_prefill_token_threshold or max_tokens)
    keys: dict[Key, None] = {}
    while num_left and (len(demands) == 1 or not keys):
        num_tokens = min(num_left, max_tokens)
        if config.enable_chunked_prefill:
            num_tokens = filled_tokens(buckets.num_tokens, num_tokens)
        keys[forward_key(buckets, num_tokens)] = None
        num_left -= num_tokens
    return keys
