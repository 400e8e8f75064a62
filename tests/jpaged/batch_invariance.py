"""The matrix of batch invariance: a request gives the same tokens in any batch and however it is scheduled.

A case is one value of every dimension. Each request of a case is compared with what it gives alone, in an engine with
room for everything, one step after another. Where all numbers are added up in an order that depends on the page size
alone (`Setup.is_exact`), tokens and logprobs must have the same bits; elsewhere a token may differ where the choice was
a near-tie.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
import pytest
from allpairspy import AllPairs

from jpaged import Engine, RequestOutput, RequestOutputKind, SamplingParams
from jpaged.scheduling.buckets import Buckets, make_buckets
from jpaged.step import step_sizes

from .shrinking_pool import withdraw

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "num_requests": (1, 2, 7, 64),
    "neighbours": ("alike", "mixed", "kin"),
    "order": ("together", "reversed", "staggered"),
    "is_stream": (False, True),
    "chunk": (0, 16, 37),
    "block_size": (8, 16, 32),
    "cache": ("off", "cold", "warm", "evicting"),
    "preemption": ("none", "recompute", "swap"),
    "is_ahead": (False, True),
}
IS_SCORED = (False, True)
"""A further dimension of covering arrays: whether every request asks for logprobs, which are read token by token."""
FEW: dict[str, tuple[Any, ...]] = {"num_requests": (1, 7, 32), "block_size": (8,)}
"""Dimensions that have fewer values in the fast suite."""


def few_buckets(**options: Any) -> Buckets:
    """Return about every other padded size, for the fast suite: of one row, of few, of many, and of prompts."""
    buckets = make_buckets(**options)
    samples = 1, 16, buckets.max_samples
    sizes = *samples, buckets.num_tokens[-1]
    return replace(buckets, num_tokens=sizes, num_samples=samples, num_plain_samples=samples, forward_tokens=sizes[1:])


MIN_PREEMPTED = 32
"""Number of requests from which on a pool that is too small must preempt some."""
OF_ENGINE = "chunk", "block_size", "cache", "preemption", "is_ahead"
"""Dimensions that an engine is made with; the others describe its requests."""
NEAR_TIE = 1e-4
"""Greatest gap between the two likeliest tokens' logprobs, or between a draw and the edge of its token in the CDF."""
MAX_EXCUSED = 1e-3
"""Greatest share of compared positions that may differ by near-ties."""
MAX_TOKENS = 16
"""Output tokens per request. With the prompt lengths below, most begin a page while they decode: then pages run out."""
MAX_CACHED = 3
"""Free pages that keep a prefix where prefixes are evicted."""
LOGPROB_TOLERANCE = 1e-5
"""Greatest difference of logprobs that come from different executables."""
SHARE_OF_NEED, SHARE_OF_FEW = 0.35, 0.12
"""Share of all pages needed that is there where requests are to be preempted. The second one is for cases in which only
a few requests run at a time: one comes each step, or steps are small."""

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 1.0, "n": 2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
    {"temperature": 0.9, "logit_bias": {7: 2.0, 11: -3.0}, "min_tokens": 3},
    {"temperature": 0.7, "bad_words": ["a b", "ee", "the end", "xyz"]},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(40, 100)), "bad_words": ["A", "bc"]},
)

Case = Mapping[str, Any]


@dataclass(frozen=True)
class Spec:
    """One request of a case."""

    prompt: tuple[int, ...]
    params: SamplingParams


def specs(neighbours: str, pick: Callable[[random.Random, int], list[int]], count: int = 64) -> list[Spec]:
    """Return `count` requests of one sort; `pick` chooses the given number of prompt tokens."""
    rng = random.Random(f"{neighbours} of the matrix")
    common = pick(rng, 48)
    found = []
    for index in range(count):
        if neighbours == "alike":
            length, kind = 27, KINDS[0]
        else:
            length, kind = rng.randint(1, 60), KINDS[index % len(KINDS)] if neighbours == "mixed" else KINDS[1]
        own = pick(rng, length)
        prompt = [*common, *own[: 1 + length // 8]] if neighbours == "kin" else own
        params = SamplingParams(**kind, max_tokens=MAX_TOKENS, ignore_eos=True, seed=index)
        found.append(Spec(tuple(prompt), params))
    return found


Item = tuple[Any, ...]
"""A token, then (token, logprob, rank) of each entry of its logprobs."""
Items = tuple[tuple[Item, ...], ...]
"""Items of a request by sample; then those of its prompt, if that was scored."""


def items_of(token_ids: Iterable[int | None], entries: Iterable[Any] | None) -> list[Item]:
    """Return the items of tokens and their logprobs."""
    if entries is None:
        return [(token,) for token in token_ids]
    logprobs = (
        () if entry is None else [(other, one.logprob, one.rank) for other, one in entry.items()] for entry in entries
    )
    return [(token, *those) for token, those in zip(token_ids, logprobs, strict=True)]


def of_prompt(output: RequestOutput) -> Items:
    """Return the items of a prompt's logprobs."""
    if output.prompt_logprobs is None:
        return ()
    return (tuple(items_of([None] * len(output.prompt_logprobs), output.prompt_logprobs)),)


def is_same(got: Item, expected: Item, tolerance: float) -> bool:
    """Return whether two items have the same token and logprobs.

    `got` may have fewer logprobs. With a tolerance, they may differ by rounding, and near-ties in their order.
    """
    if got[0] != expected[0]:
        return False
    if not tolerance:
        return got == expected if len(got) == len(expected) else set(got[1:]) <= set(expected[1:])
    ours, theirs = (sorted(logprob for _, logprob, _ in item[1:]) for item in (got, expected))
    is_own_near = len(got) == 1 or abs(got[1][1] - expected[1][1]) <= tolerance  # The token itself comes first.
    are_all_near = len(ours) != len(theirs) or all(abs(x - y) <= tolerance for x, y in zip(ours, theirs, strict=True))
    return is_own_near and are_all_near


class Solo:
    """An engine that computes each request alone, and how near each of its choices was to another token."""

    def __init__(self, model: str | None, *, block_size: int, is_deterministic: bool, **sizes: Any):
        self.options = {
            **sizes,
            "block_size": block_size,
            "async_scheduling": False,
            "num_decode_steps": 1,
            "enable_prefix_caching": False,
        }
        self.model, self.block_size = model, block_size
        self.engine = Engine(model, **self.options, deterministic=is_deterministic)
        self._known: dict[Spec, Items] = {}

    def __enter__(self) -> Solo:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.shutdown()

    def items(self, spec: Spec) -> Items:
        """Return the items of a request, with at least two logprobs per output token; computed once."""
        if spec not in self._known:
            (output,) = self.engine.generate([list(spec.prompt)], scored(spec.params), use_tqdm=False)
            samples = tuple(tuple(items_of(one.token_ids, one.logprobs)) for one in output.outputs)
            self._known[spec] = samples + of_prompt(output)
        return self._known[spec]

    def margin(self, spec: Spec, sample: int, position: int) -> float:
        """Return how far the choice of the output token at `position` was from another token."""
        is_greedy = spec.params.is_greedy
        params = replace(
            spec.params,
            logprobs=2 if is_greedy else -1,
            max_tokens=position + 1,
            min_tokens=min(spec.params.min_tokens, position + 1),
        )
        with Engine(self.model, **self.options, max_logprobs=-1, logprobs_mode="processed_logprobs") as engine:
            (output,) = engine.generate([list(spec.prompt)], params, use_tqdm=False)
        completion = output.outputs[sample]
        token, entry = completion.token_ids[position], completion.logprobs[position]
        if is_greedy:
            first, second = sorted((one.logprob for one in entry.values()), reverse=True)[:2]
            return first - second
        vocab_size = self.engine.handle.spec.vocab_size
        shares = np.zeros(vocab_size)
        for token_id, one in entry.items():
            shares[token_id] = math.exp(one.logprob)
        return margin_of_draw(shares, token, uniforms_of(spec.params.seed, sample, position))


def uniforms_of(seed: int, sample: int, position: int) -> np.ndarray:
    """Return the random numbers that a token is drawn by, computed from its key by plain jax.random calls."""
    key = jax.random.key(seed, impl="threefry2x32")
    for part in (sample, position, 0):
        key = jax.random.fold_in(key, part)
    return (np.asarray(jax.random.bits(key, (8,), np.uint32)) >> 8) * 2.0**-24


def margin_of_draw(shares: np.ndarray, token: int, uniforms: np.ndarray) -> float:
    """Return how far the draws of a token, one per level of a tree over the vocabulary, were from another branch.

    A level of n nodes has one of n ÷ 16 above it, rounded up to m; node g there has the children g, g + m, g + 2 m …
    """
    branches: list[tuple[np.ndarray, int]] = []
    sums, node, above = shares, token, 0
    while above != 1:
        above = -(-len(sums) // 16)
        branches.append((sums[node % above :: above], node // above))
        sums, node = np.pad(sums, (0, 16 * above - len(sums))).reshape(16, above).sum(axis=0), node % above
    margin = 1.0
    for (weights, branch), uniform in zip(reversed(branches), uniforms, strict=False):
        ends = np.cumsum(weights) / weights.sum()
        start = ends[branch - 1] if branch else 0.0
        margin = min(margin, abs(uniform - start), abs(ends[branch] - uniform))
    return margin


@dataclass
class Comparison:
    """Numbers of compared and excused positions, and every difference that has no excuse."""

    solo: Solo
    num_compared: int = 0
    num_excused: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, spec: Spec, got: Items, where: object, *, tolerance: float) -> None:
        """Compare one request of a case with what it gives alone; without a tolerance nothing is excused."""
        expected = self.solo.items(spec)
        assert len(got) == len(expected), where
        for sample, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            assert len(ours) == len(theirs), where
            pairs = enumerate(zip(ours, theirs, strict=True))
            place = next((at for at, pair in pairs if not is_same(*pair, tolerance)), None)
            self.num_compared += len(theirs) if place is None else place + 1
            if place is None:
                continue
            is_choice = ours[place][0] != theirs[place][0] and tolerance > 0
            margin = self.solo.margin(spec, sample, place) if is_choice else math.inf
            if margin <= NEAR_TIE:
                self.num_excused += 1  # Behind it the two go on from different texts.
            else:
                self.differences.append(f"{where}: sample {sample}, token {place}, margin {margin:.2g}")

    def check(self) -> None:
        print(f"batch invariance: {self.num_compared} tokens compared, {self.num_excused} near-ties excused")
        assert not self.differences, "\n".join(self.differences[:10])
        assert self.num_excused <= MAX_EXCUSED * self.num_compared


@dataclass(frozen=True)
class Setup:
    """A model on which cases are run, the sizes of its engines, and the requests to make."""

    model: str | None
    vocab: Sequence[int]
    sizes: Mapping[str, Any]
    given: Callable[[SamplingParams], SamplingParams] = lambda params: params
    """Changes the parameters that engines of cases are given; those of the request alone stay."""
    is_exact: bool = True
    """A request has the same bits in any batch, where the page size is that of the request alone."""
    is_deterministic: bool = False
    """Engines are made with `deterministic`."""
    tolerance: float = LOGPROB_TOLERANCE
    """Greatest difference of logprobs where the bits may differ."""
    is_text: bool = False
    """`vocab` holds the tokens of a text in their order, and prompts are pieces of it."""
    buckets: Callable[..., Buckets] = make_buckets
    """Makes the padded sizes of its engines' steps."""

    def solo(self, block_size: int = 16) -> Solo:
        sizes = {**self.sizes, "num_blocks": self.num_blocks(block_size)}
        with self._with_buckets():
            return Solo(self.model, block_size=block_size, is_deterministic=self.is_deterministic, **sizes)

    @contextmanager
    def _with_buckets(self) -> Iterator[None]:
        """Let engines that are made here have these buckets."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_sizes, "make_buckets", self.buckets)
            yield

    def num_blocks(self, block_size: int) -> int:
        """Return the size of a pool that holds every sequence at full length: engines of one size share programs."""
        return 1 + self.sizes["max_num_seqs"] * -(-self.sizes["max_model_len"] // block_size)

    def pick(self, rng: random.Random, count: int) -> list[int]:
        """Choose `count` tokens of a prompt."""
        if not self.is_text:
            return rng.choices(self.vocab, k=count)
        start = rng.randrange(len(self.vocab) - count)
        return list(self.vocab[start : start + count])

    @cached_property
    def requests(self) -> dict[str, list[Spec]]:
        return {name: specs(name, self.pick) for name in DIMENSIONS["neighbours"]}

    def engine(self, case: Case) -> Engine:
        block_size, cache, preemption = case["block_size"], case["cache"], case["preemption"]
        ahead = {} if case["is_ahead"] else {"async_scheduling": False, "num_decode_steps": 1}
        num_blocks = self.num_blocks(block_size)
        with self._with_buckets():
            return Engine(
                self.model,
                **{"deterministic": self.is_deterministic, **self.sizes, **ahead},
                block_size=block_size,
                num_blocks=num_blocks,
                long_prefill_token_threshold=case["chunk"],
                enable_chunked_prefill=case["chunk"] > 0 or self.is_deterministic,
                enable_prefix_caching=cache != "off",
                max_cached_blocks=MAX_CACHED if cache == "evicting" else None,
                preemption_mode="auto" if preemption == "none" else preemption,
                num_host_blocks=num_blocks if preemption == "swap" else 0,
            )

    def run(self, engine: Engine, case: Case, comparison: Comparison) -> None:
        """Give the engine the case's requests and compare; counters prove that the case was what it is called."""
        requests = self.requests[case["neighbours"]][: case["num_requests"]]
        is_exact = self.is_exact and case["block_size"] == comparison.solo.block_size
        engine.reset_prefix_cache()
        if case["cache"] == "warm":
            # Where few pages are left, those of the last requests are: of the first requests of the next run.
            order = "together" if case["order"] == "reversed" else "reversed"
            self._outputs(engine, requests, {**case, "order": order})
        before = engine.stats()
        share = SHARE_OF_FEW if case["order"] == "staggered" or self.is_deterministic else SHARE_OF_NEED
        with _pages_kept_away(engine, requests, share) if case["preemption"] != "none" else nullcontext():
            for spec, items in zip(requests, self._outputs(engine, requests, case), strict=True):
                where = {**case, "seed": spec.params.seed}
                comparison.add(spec, items, where, tolerance=0.0 if is_exact else self.tolerance)
        after = engine.stats()
        grown = {name: after[name] - before[name] for name in after}
        assert after["recompiles"] == 0
        assert after["blocks_used"] == after["host_blocks_used"] == after["requests"] == 0
        if case["preemption"] != "none" and case["num_requests"] >= MIN_PREEMPTED:
            assert grown[f"preemptions_{case['preemption']}"] > 0, case
        if case["preemption"] == "none":
            assert grown["preemptions"] == 0, case
        if case["cache"] == "warm":
            assert grown["prefix_cache_hits"] > 0 or max(len(spec.prompt) for spec in requests) <= case["block_size"]
        if case["cache"] == "off":
            assert grown["prefix_cache_hits"] == 0
        if case["cache"] == "evicting" and case["num_requests"] > 2 and case["preemption"] == "none":
            assert len(engine.blocks.device.cached) == MAX_CACHED

    def _outputs(self, engine: Engine, requests: Sequence[Spec], case: Case) -> list[Items]:
        """Return the results of all requests, queued and read in the way of the case."""
        kind = RequestOutputKind.DELTA if case["is_stream"] else RequestOutputKind.FINAL_ONLY
        items: dict[str, list[list[Item]]] = {}
        of_prompts: dict[str, Items] = {}
        waiting = list(enumerate(requests))
        if case["order"] == "reversed":
            waiting.reverse()
        num_at_once = 1 if case["order"] == "staggered" else len(waiting)
        while waiting or engine.has_unfinished_requests():
            for index, spec in waiting[:num_at_once]:
                params = replace(self.given(spec.params), output_kind=kind)
                engine.add_request(str(index), list(spec.prompt), scored(params) if case["is_scored"] else params)
                items[str(index)] = [[] for _ in range(params.n)]
            del waiting[:num_at_once]
            for output in engine.step():
                for completion in output.outputs:
                    items[output.request_id][completion.index] += items_of(completion.token_ids, completion.logprobs)
                of_prompts[output.request_id] = of_prompts.get(output.request_id) or of_prompt(output)
        names = [str(index) for index in range(len(requests))]
        return [tuple(map(tuple, items[name])) + of_prompts[name] for name in names]


def scored(params: SamplingParams) -> SamplingParams:
    """Return the same parameters with logprobs of each token."""
    return replace(params, logprobs=params.logprobs or 2)


@contextmanager
def _pages_kept_away(engine: Engine, requests: Sequence[Spec], share: float) -> Iterator[None]:
    """Leave so few pages that requests that run together are preempted."""
    size, pool = engine.step_sizes.block_size, engine.blocks.device
    needs = [spec.params.n * -(-(len(spec.prompt) + MAX_TOKENS) // size) for spec in requests]
    ends = [(spec.prompt, end) for spec in requests for end in range(size, len(spec.prompt), size)]
    num_shared = len(ends) - len({prompt[:end] for prompt, end in ends}) if engine.config.enable_prefix_caching else 0
    room = max(max(needs), math.ceil(share * (sum(needs) - num_shared)))
    num_away = pool.num_usable - room
    withdraw(pool, num_away)
    yield
    withdraw(pool, -num_away)


def all_cases() -> Iterator[Case]:
    """Give the whole matrix, the cases of one engine one after another."""
    names = [*OF_ENGINE, *(name for name in DIMENSIONS if name not in OF_ENGINE)]
    for values in itertools.product(*(DIMENSIONS[name] for name in names)):
        yield {**dict(zip(names, values, strict=True)), "is_scored": False}


def covering_cases(**dimensions: tuple[Any, ...]) -> list[Case]:
    """Return few cases among which every pair of values of two dimensions is; keywords replace dimensions."""
    dimensions = {**DIMENSIONS, "is_scored": IS_SCORED, **dimensions}
    return [dict(zip(dimensions, values, strict=True)) for values in AllPairs([*dimensions.values()])]
