"""Chooses which executables are compiled at start, and in which order.

With `warmup=lazy`, those that the known requests need first are compiled while the weights are read, and others after
the first step. On a CPU only what is known to be needed is compiled ahead: the compiler takes the cores that compute
steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from importlib.util import find_spec
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
    """Return two lists of program keys: those to compile while the weights are read, and those after the first step.

    `demands` are the requests that are known to come, `modes` their sampling modes; both are empty if the requests are
    not known. With `warmup=full` the first list has all programs but those for grammars, which the second list has;
    with `off` both lists are empty, and each program is compiled at its first use. With `lazy` the first list has what
    the first token of the known requests needs: forward programs for their prompts, and samplers. The second list has
    what decoding them needs and, except on a CPU, all programs; a key may be in both lists. Samplers of the first list
    may be started earlier, beside the check of the backend. Without known requests the
    first list is empty. Where llguidance is not installed, no request has a grammar.
    """
    all_keys = _by_need(programs.lower)
    masked_keys = _by_need(programs.lower_masked) if find_spec("llguidance") is not None else []
    if config.warmup == "full":
        return all_keys, masked_keys
    if config.warmup == "off":
        return [], []
    all_keys += masked_keys
    if not demands:
        return [], [] if is_cpu else all_keys
    buckets = builder.buckets
    # The rows of the steps that decode, once all samples run; at most as many as a step may have.
    num_seqs = min(sum(demand.num_samples for demand in demands), builder.sizes.max_num_seqs)
    kinds = sorted({demand.has_grammar for demand in demands})
    samplers = dict.fromkeys(sample_key(buckets, num_seqs, mode, is_masked=kind) for mode in modes for kind in kinds)
    decodes = [decode_key(buckets, num_seqs, mode) for mode in modes]
    decodes.append(forward_key(buckets, num_seqs, decodes_only=True))
    # A mode without a decode program has the key None, which is left out here.
    deferred = [key for key in dict.fromkeys(decodes) if key in programs.lower]
    return [*_prompt_keys(config, builder, demands), *samplers], deferred if is_cpu else [*deferred, *all_keys]


def _by_need(keys: Iterable[Key]) -> list[Key]:
    """Return the keys sorted by how soon requests that are not known yet are likely to need the programs.

    First the allocation of the device state, without which no step runs. Then the forward programs of long steps (of at
    least LONG_STEP tokens), the largest first: they serve any first prompt and take longest to compile. Then samplers
    and decode programs, for few rows first. Then the other forward programs, the largest first, and last those without
    a size, such as page moves.
    """

    def need(key: Any) -> tuple[int, int]:
        # A key is (name,), (name, size) or (name, size, mode). The result is (rank of the kind, rank in the kind).
        name, size = key[0], key[1] if len(key) > 1 else 0
        if name == "forward":
            return (1, -size) if size >= LONG_STEP else (3, -size)
        return (2, size) if size else (0 if key == ALLOCATE_KEY else 4, 0)

    return sorted(keys, key=need)


def _prompt_keys(config: EngineConfig, builder: StepInputBuilder, demands: Sequence[Demand]) -> dict[Key, None]:
    """Return the keys of the forward programs that the first token waits for, in the order of their steps.

    The keys are those of a dict, so that each occurs once. A single prompt is followed through the steps of all its
    chunks, as the scheduler cuts them. Of several prompts only the first step can be foretold, which takes as many of
    their tokens as a step may have. `demands` must not be empty.
    """
    buckets, max_tokens = builder.buckets, builder.sizes.max_num_batched_tokens
    num_uncomputed = sum(demand.prompt_len for demand in demands)
    if len(demands) == 1 and config.enable_chunked_prefill:
        max_tokens = min(max_tokens, config.long_prefill_token_threshold or max_tokens)
    keys: dict[Key, None] = {}
    while num_uncomputed and (len(demands) == 1 or not keys):
        num_tokens = min(num_uncomputed, max_tokens)
        if config.enable_chunked_prefill:  # Without it a prompt is not cut.
            # The scheduler may leave tokens to the next step, so that this one fills its bucket.
            num_tokens = filled_tokens(buckets.num_tokens, num_tokens)
        keys[forward_key(buckets, num_tokens)] = None
        num_uncomputed -= num_tokens
    return keys
