"""Chooses which executables are compiled at start, and in which order.

With `warmup=lazy`, those that the known requests need first are compiled while the weights are read, and others after
the first step. On a CPU only what is known to be needed is compiled ahead: the compiler takes the cores that compute
steps. A server knows no requests: it is ready with the few programs that can compute a plain one, and compiles the
others behind (`served_keys`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from ..config.engine_config import EngineConfig
from ..sampling.sampling_params import SampleMode
from ..scheduling.buckets import filled_tokens
from ..step.compile_plan import Key
from ..step.program_keys import ALLOCATE_KEY, decode_key, forward_key, sample_key
from ..step.programs import Programs
from ..step.step_inputs import StepInputBuilder
from .sizing.sizes import Demand

CPU_PROMPT_TOKENS, DEVICE_PROMPT_TOKENS = 64, 512
"""Tokens of the steps that compute prompts when a server is ready, on a CPU and elsewhere. They are few, since padding
takes time on a CPU."""
FEW_ROWS = 8
"""Rows that a server decodes without much padding when it is ready."""
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
    masked_keys = _by_need(programs.lower_masked) if _has_grammars() else []
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


def served_keys(
    config: EngineConfig, programs: Programs, builder: StepInputBuilder, *, is_cpu: bool
) -> tuple[list[Key], list[Key]]:
    """Return the keys of the programs that a server is ready with, and those that it compiles behind, both in order.

    The first list computes any plain request: a forward program for prompts, which are cut to its size, those for one
    row that decodes and for FEW_ROWS, and the samplers for one row, for FEW_ROWS and for as many as a step may have.
    Where prompts are not cut, the largest forward program is among them. In the second list come the programs without a
    size, which take milliseconds, then those for steps of few tokens first, and last the samplers for rows with masks.
    Of a sampling mode that the first list has not, the sampler for most rows is the first: requests of the mode wait
    for it. A CPU's programs that decode several tokens in that mode are in neither: they take a fifth of the memory of
    all programs, and are compiled once a request of the mode runs.
    """
    buckets, max_tokens = builder.buckets, builder.sizes.max_num_batched_tokens
    plain = buckets.mode_for(SampleMode.RANDOM)
    num_few = min(FEW_ROWS, buckets.max_samples)
    first: list[Key] = [
        sample_key(buckets, buckets.max_samples, plain),  # It takes longest.
        sample_key(buckets, num_few, plain),
        forward_key(buckets, served_prompt_tokens(builder, is_cpu=is_cpu)),
        sample_key(buckets, 1, plain),
        forward_key(buckets, 1, decodes_only=True),
        forward_key(buckets, num_few, decodes_only=True),
    ]
    if not config.enable_chunked_prefill:
        first.append(forward_key(buckets, max_tokens))
    first = list(dict.fromkeys(first))

    def rank(key: Any) -> tuple[Any, ...]:
        name, size, mode = (*key, 0, None)[:3]
        if not size:
            return (0,)
        if name.startswith("forward"):
            return 1, size
        is_plain, is_largest = mode is plain, size == buckets.max_samples
        if name == "sample" and is_plain:
            return 1, size + 0.5  # Beside the forward program of the same steps.
        if name == "sample":
            return 2, buckets.modes.index(mode), not is_largest, size
        if name == "decode":
            return 3, not is_plain, size
        return 4, not is_largest, buckets.modes.index(mode), size

    def is_behind(key: Any) -> bool:
        return key not in first and not (is_cpu and key[0] == "decode" and key[2] is not plain)

    keys = [*programs.lower, *(programs.lower_masked if _has_grammars() else ())]
    return first, sorted(filter(is_behind, keys), key=rank)


def served_prompt_tokens(builder: StepInputBuilder, *, is_cpu: bool) -> int:
    """Return the token bucket of the steps that compute prompts when a server is ready."""
    num_tokens = CPU_PROMPT_TOKENS if is_cpu else DEVICE_PROMPT_TOKENS
    return builder.buckets.tokens_for(min(num_tokens, builder.sizes.max_num_batched_tokens))


def _has_grammars() -> bool:
    """Return whether requests may have a grammar, which needs llguidance."""
    return find_spec("llguidance") is not None


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
