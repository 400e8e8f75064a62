"""Times what the host core costs per step and per request, beside a device that takes no time.

    python scripts/bench/scheduler.py -o scheduler.json

The scheduler, block manager, step builder and output rules are those of the engine; only the programs compute nothing
(`instant_runner`). Two situations are measured: 256 sequences that decode, and the same with new requests, while more
or fewer requests wait; the queue keeps its length, since each request that ends is replaced by another. Detokenizing
and the hashing of prefixes are measured separately, the text with the default model's tokenizer.
"""

from __future__ import annotations

import platform
import random
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.checks import refusal
from jpaged.commands.bench.report import add_report_flags, parse_bench, write_report
from jpaged.commands.flags import FlagParser
from jpaged.commands.process import run_command
from jpaged.commands.progress import say
from jpaged.config.engine_config import EngineConfig
from jpaged.core.engine_core import EngineCore
from jpaged.core.step_record import StepRecord
from jpaged.engine import Engine
from jpaged.errors import ConfigError
from jpaged.kv_cache.block_manager import BlockManager
from jpaged.kv_cache.page_arithmetic import PageArithmetic
from jpaged.kv_cache.prefix_hash import extend_hashes
from jpaged.messages import NewRequest
from jpaged.models.weights.weights import Weights
from jpaged.outputs import SampleDelta
from jpaged.pallas_kernels.ragged_paged_attention.interface import KVShape
from jpaged.pallas_kernels.ragged_paged_attention.paged_cache import PagedCache
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.request import NO_EXTRAS, Request
from jpaged.sampling.logit_rules_spec import LogitRulesSpec
from jpaged.sampling.sample_columns import SAMPLE_FIELDS, num_mask_words
from jpaged.sampling.sampler import SampledRows
from jpaged.sampling.sampling_params import SampleMode, SamplingParams
from jpaged.scheduling.scheduler import Scheduler
from jpaged.scheduling.scheduler_config import SchedulerConfig
from jpaged.sharding import device_mesh
from jpaged.startup.open_model import open_model
from jpaged.step.compile_plan import CompilePlan
from jpaged.step.program_keys import ALLOCATE_KEY, TABLES_KEY, layout_key
from jpaged.step.runner import Runner
from jpaged.step.step import DeviceState
from jpaged.step.step_inputs import StepInputBuilder
from jpaged.step.step_layout import CHANGE_FIELDS
from jpaged.step.step_sizes import StepSizes
from jpaged.text.output_processor import OutputProcessor
from jpaged.text.tokenizing.detokenizer import Detokenizer
from jpaged.text.tokenizing.tokenizer import Tokenizer

PROMPT_LEN, OUTPUT_LEN = 512, 128
VOCAB_SIZE = 32_000
PARAMS = SamplingParams(max_tokens=OUTPUT_LEN, detokenize=False)
NUM_WEIGHTS = 32 * 6 + 3
"""Weight arrays of a model of 32 layers, which each call of a program hands over."""
DRAWN_TOKEN = 1_000
"""The token that every sequence draws; it ends none, and is a word in the default model's vocabulary."""
HASHED_PAGE = 16
"""Tokens per page in the measurement of hashing."""


class Rules(NamedTuple):
    """The logit rules of a device that applies none: what tells the size of masks."""

    bias: jax.Array


def instant_runner(builder: StepInputBuilder) -> Runner:
    """Return the engine's own runner over programs with a model's arguments and results that compute nothing.

    Each call hands over as many weight arrays as a model of 32 layers has, a donated state and the step's packed
    input. Every row draws DRAWN_TOKEN.
    """
    mesh = device_mesh(jax.devices("cpu")[:1])
    page_size = builder.sizes.block_size
    layout = builder.backend.layout(KVShape(1, 2, page_size, num_kv_heads=1, head_size=8, dtype=np.float32))
    cache = PagedCache(tuple(jnp.zeros(shape) for shape in layout.shapes), layout, (), builder.backend)
    buckets, num_slots = builder.buckets, builder.sizes.max_num_seqs + 1

    def allocate() -> tuple[DeviceState, Rules]:
        tables = jnp.zeros(builder.tables.shape, jnp.int32)
        rules = Rules(jnp.zeros((1, builder.rules_spec.vocab_size)))
        last_tokens, hidden = jnp.zeros(num_slots, jnp.int32), jnp.zeros((buckets.num_tokens[-1], 8))
        return DeviceState(jax.tree.map(jnp.copy, cache), tables, last_tokens, hidden), rules

    def forward(leaves: Any, state: DeviceState, inputs: Any) -> Any:
        return state, jnp.zeros((len(SAMPLE_FIELDS), buckets.max_samples), jnp.int32)

    def sample(num_rows: int, leaves: Any, kept: Any, hidden: Any, columns: Any, masks: Any) -> Any:
        drawn = SampledRows(token_ids=jnp.full(num_rows, DRAWN_TOKEN, jnp.int32), is_finite=jnp.ones(num_rows, bool))
        return kept, drawn

    def update_tables(tables: Any, changes: Any) -> Any:
        return tables

    def lower(run: Any, *shapes: Any) -> Any:
        return lambda: jax.jit(run, donate_argnums=1, keep_unused=True).lower(*shapes)

    paths = [("layers", index) for index in range(NUM_WEIGHTS - 1)] + [("head", 0)]
    state_of_model = nnx.from_flat_state({path: nnx.Param(jnp.zeros(1)) for path in paths})
    weights = Weights(None, state_of_model, jnp.float32, logits_modules=("head",))
    leaves, logits_leaves = tuple(jax.tree.leaves(weights.state)), tuple(weights.split_logits()[0])
    state, rules = jax.eval_shape(allocate)
    _, columns = jax.eval_shape(forward, leaves, state, None)
    changes = jnp.zeros((len(CHANGE_FIELDS), builder.num_changes), jnp.int32)
    programs: dict[Any, Any] = {
        ALLOCATE_KEY: lambda: jax.jit(allocate).lower(),
        TABLES_KEY: lambda: jax.jit(update_tables, keep_unused=True).lower(state.page_tables, changes),
    }
    for step_layout in builder.layouts.values():
        programs[layout_key(step_layout)] = lower(forward, leaves, state, jnp.zeros(step_layout.size, jnp.int32))
    for mode in buckets.modes:
        for size in buckets.num_samples:
            masks = jnp.zeros((size, num_mask_words(builder.rules_spec.vocab_size)), jnp.int32)
            kept = state.last_tokens, rules if mode is SampleMode.FULL else None
            shapes = logits_leaves, kept, state.hidden, columns
            masked = lower(partial(sample, size), *shapes, masks)
            if buckets.masks_apart:
                programs["sample", size, mode] = lower(partial(sample, size), *shapes, None)
                programs["sample_masked", size, mode] = masked
            else:
                programs["sample", size, mode] = masked
    plan = CompilePlan(programs)
    plan.start(programs)
    plan.wait()
    return Runner(weights=weights, compile_plan=plan, buckets=buckets, mesh=mesh)


class Stopwatch:
    """Keeps the times of the steps that it is told of."""

    def __init__(self) -> None:
        self.times_s: list[tuple[float, float, float, float]] = []
        """Seconds of schedule, build, dispatch and process of each step; process includes reading its results."""

    def dispatched(self, record: StepRecord) -> None:
        """Wait for the end of the step."""

    def retired(self, record: StepRecord) -> None:
        """Keep the times of a step. Its record would be an object for each row, which the garbage collector visits."""
        process_s = record.read_s + record.process_s
        self.times_s.append((record.schedule_s, record.build_s, record.dispatch_s, process_s))

    def summary(self) -> dict[str, dict[str, float]]:
        """Return microseconds of each part and of a whole step, as median and 99th percentile."""
        columns = dict(zip(("schedule", "build", "dispatch", "process"), np.array(self.times_s).T, strict=True))
        columns["schedule + process"] = columns["schedule"] + columns["process"]
        columns["sum"] = columns["schedule + process"] + columns["build"] + columns["dispatch"]
        return {
            name: {f"p{q}": round(1e6 * float(np.percentile(values, q)), 1) for q in (50, 99)}
            for name, values in columns.items()
        }


class Host:
    """A host core over an instant device, and a supply of requests."""

    def __init__(self, *, num_running: int, block_size: int):
        pages = -(-(PROMPT_LEN + OUTPUT_LEN) // block_size)
        num_tokens = max(8192, num_running)
        arithmetic = PageArithmetic((None,), block_size, num_tokens)
        blocks = BlockManager(num_blocks=1 + 2 * num_running * pages, arithmetic=arithmetic)
        config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=num_tokens, watermark=0.01)
        self.scheduler = Scheduler(blocks, config, clock=time.monotonic)
        sizes = StepSizes("float32", "float32", block_size, PROMPT_LEN + OUTPUT_LEN, num_running, num_tokens)
        builder = StepInputBuilder(sizes, sizes.buckets("gpu"), XlaBackend(), rules_spec=LogitRulesSpec(VOCAB_SIZE))
        self.tokens = np.random.default_rng(0).integers(10, VOCAB_SIZE, 1 << 20).tolist()
        self.random = random.Random(0)
        self.num_requests = 0
        self.runner, outputs = instant_runner(builder), OutputProcessor(None, eos_token_ids=(2,))
        self.core = EngineCore(
            scheduler=self.scheduler, builder=builder, runner=self.runner, outputs=outputs, clock=time.monotonic
        )

    def add(self, *, prompt_len: int = PROMPT_LEN, max_tokens: int = OUTPUT_LEN) -> Request:
        """Queue a request whose prompt shares no prefix with another."""
        start = self.random.randrange(len(self.tokens) - prompt_len)
        new = NewRequest(
            request_id=str(self.num_requests),
            number=self.num_requests,
            prompt_token_ids=array("i", self.tokens[start : start + prompt_len]).tobytes(),
            prompt=None,
            params=PARAMS,
            max_tokens=max_tokens,
            stop_ids=PARAMS.end_ids(self.core.outputs.eos_token_ids),
            arrival_time=time.monotonic(),
        )
        self.num_requests += 1
        return self.core.add(new)

    def step(self) -> int:
        """Run one step; return how many requests it ended."""
        self.core.dispatch()
        jax.block_until_ready(self.runner.state)  # So that `retire` measures the host and does not wait.
        self.core.retire()
        num_ended = len(self.scheduler.ended)
        self.scheduler.ended.clear()
        return num_ended

    def end_requests(self, num_requests: int) -> int:
        """Run steps until at least `num_requests` have ended, each replaced by a new one; return how many have."""
        num_ended = 0
        while num_ended < num_requests:
            num_of_step = self.step()
            for _ in range(num_of_step):
                self.add()
            num_ended += num_of_step
        return num_ended

    def start_watch(self) -> Stopwatch:
        """Let a stopwatch observe the steps from now on, and return it."""
        self.core.observer = watch = Stopwatch()
        return watch


def bench_decode(*, num_running: int, block_size: int, num_steps: int) -> dict[str, Any]:
    """Measure steps in which all sequences decode, each at another offset of its page, and no request comes or ends."""
    host = Host(num_running=num_running, block_size=block_size)
    lens = [index % block_size for index in range(num_running)]
    requests = [host.add(prompt_len=PROMPT_LEN - more, max_tokens=OUTPUT_LEN + more) for more in lens]
    sequences = [sequence for request in requests for sequence in request.live]
    while not all(sequence.num_output_tokens >= 2 for sequence in sequences):
        host.step()
    watch = host.start_watch()
    for _ in range(min(num_steps, OUTPUT_LEN - 10)):
        host.step()
    host.runner.close()
    return watch.summary()


def bench_queue(*, num_running: int, num_queued: int, block_size: int, num_requests: int) -> dict[str, Any]:
    """Measure a full batch with new requests while `num_queued` wait, until `num_requests` requests have ended."""
    host = Host(num_running=num_running, block_size=block_size)
    for index in range(num_running):  # Outputs of all lengths, as if the requests had arrived one after another.
        host.add(max_tokens=1 + OUTPUT_LEN * (index + 1) // num_running)
    for _ in range(num_queued):
        host.add()
    host.end_requests(num_running)
    watch = host.start_watch()
    start = time.perf_counter()
    num_ended = host.end_requests(num_requests)
    seconds = time.perf_counter() - start
    assert len(host.scheduler.waiting) >= num_queued, "the queue has kept its length"
    host.runner.close()
    return {"queued": num_queued, "us_per_request": round(1e6 * seconds / num_ended, 1), "step_us": watch.summary()}


def bench_publishing(*, num_running: int, num_steps: int) -> dict[str, dict[str, float]]:
    """Measure whole steps of an engine in which all sequences decode and the caller takes what is new.

    `deltas` and `outputs` name what the caller takes, `deltas with grammars` has a grammar that allows any text for
    each sequence; `publish_us_per_row` is what a step takes beyond its parts in the
    host core, for each sequence. The parts are those of later steps, since an observer takes time itself.
    """
    # Times need no weights that mean anything, and a model of one layer is made sooner.
    model: dict[str, Any] = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 1}, "warmup": "off"}
    sizes: dict[str, Any] = {"max_num_seqs": num_running, "max_model_len": PROMPT_LEN, "num_decode_steps": 1}
    params = SamplingParams(max_tokens=2 * num_steps + 40, temperature=0.0, ignore_eos=True)
    first = 40  # From here on all prompts are computed, and no sequence ends before the steps that are measured do.
    found = {}
    structured = replace(params, structured_outputs={"regex": "(?s:.*)"})
    ways = {
        "deltas": (_run_with_deltas, params),
        "outputs": (_run_with_outputs, params),
        "deltas with grammars": (_run_with_deltas, structured),
    }
    for taken, (run, asked) in ways.items():
        with Engine(**model, **sizes, block_size=16, num_blocks=1 + num_running * PROMPT_LEN // 16) as engine:
            engine.core.runner = runner = instant_runner(engine.core.builder)
            for index in range(num_running):
                engine.add_request(str(index), [100 + index] * (100 + index % 16), asked)
            watch = Stopwatch()
            step_us = 1e6 * run(engine, watch, first + num_steps)[first : first + num_steps]
            runner.close()
        core_us = 1e6 * sum(map(sum, watch.times_s[:num_steps])) / num_steps
        quantiles = {f"p{q}": round(float(np.percentile(step_us, q)), 1) for q in (50, 99)}
        found[taken] = {**quantiles, "publish_us_per_row": round((float(step_us.mean()) - core_us) / num_running, 2)}
    return found


def _run_with_outputs(engine: Engine, watch: Stopwatch, num_unwatched: int) -> np.ndarray:
    """Step an engine until no request is left, with an observer after so many steps; return the seconds of each."""
    times = [time.perf_counter()]
    while engine.has_unfinished_requests():
        if len(times) > num_unwatched:
            engine.core.observer = watch
        engine.step()
        times.append(time.perf_counter())
    return np.diff(times)


def _run_with_deltas(engine: Engine, watch: Stopwatch, num_unwatched: int) -> np.ndarray:
    """Run an engine's requests while deltas are taken, otherwise as `_run_with_outputs` does."""
    times = [time.perf_counter()]

    def take(deltas: list[SampleDelta]) -> None:
        times.append(time.perf_counter())
        if len(times) > num_unwatched:
            engine.core.observer = watch

    for _ in engine.run_requests(stream=take):
        pass
    return np.diff(times)


def bench_hashing(*, num_pages: int = 20_000) -> dict[str, float]:
    """Measure the microseconds to hash a full page of 16 tokens and look it up, as matching a long prompt does."""
    tokens = np.random.default_rng(1).integers(10, VOCAB_SIZE, num_pages * HASHED_PAGE).tolist()
    options: dict[str, Any] = {"params": PARAMS, "arrival_time": 0.0, "engine_seed": 0, "num_groups": 1}
    request = Request(request_id="0", number=0, prompt_token_ids=array("i", tokens), max_tokens=1, **options)
    blocks = BlockManager(num_blocks=num_pages + 2, arithmetic=PageArithmetic((None,), HASHED_PAGE))
    hashes: list[bytes] = []
    extend_hashes(hashes, request.prompt_token_ids, num_pages, HASHED_PAGE, NO_EXTRAS)
    for page, page_hash in enumerate(hashes, 1):
        blocks.device.take()
        blocks.device.publish(page, (0, page_hash))
    sequence, times = request.sequences[0], []
    for _ in range(5):
        blocks.prefixes.forget_hashes(sequence)
        start = time.perf_counter()
        match = blocks.prefixes.match(sequence, len(tokens))
        times.append(time.perf_counter() - start)
        assert match.num_pages == num_pages
    return {"us_per_page": round(1e6 * median(times) / num_pages, 3), "page_tokens": HASHED_PAGE}


def bench_detokenizing(tokenizer: Tokenizer, *, num_tokens: int = 20_000) -> dict[str, float]:
    """Measure the microseconds per token to detokenize a stream token by token, without and with stop strings."""
    once = tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))
    token_ids = list(islice(cycle(once), num_tokens))
    found = {}
    for name, stop in (("plain", ()), ("stop_strings", ("\n\n\n\n", "\n\x00"))):
        times = []
        for _ in range(5):
            detokenizer = Detokenizer(tokenizer, once[:10], stop=stop)
            start = time.perf_counter()
            for token_id in token_ids:
                detokenizer.append([token_id])
                detokenizer.delta()
            times.append(time.perf_counter() - start)
            assert detokenizer.num_tokens == num_tokens, "no stop string is in the text"
        found[f"us_per_token_{name}"] = round(1e6 * median(times) / num_tokens, 3)
    return found


def main(argv: Sequence[str]) -> int:
    """Run the bench; the table goes to stderr, the JSON to stdout or a file."""
    parser = FlagParser(prog="scheduler.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    lengths = [1_000, 10_000, 100_000]
    parser.add_argument("--queued", type=int, nargs="+", default=lengths, metavar="N", help="lengths of the queue")
    parser.add_argument("--running", type=int, default=256, help="sequences that run together")
    parser.add_argument("--requests", type=int, default=1_024, help="requests per measurement of a queue")
    parser.add_argument("--block-size", type=int, default=64, help="tokens per page")
    add_report_flags(parser, 5, "runs of everything")
    args = parse_bench(parser, argv, "running", "requests", "block_size")
    if min(args.queued) < 0:
        raise refusal("--queued", min(args.queued), "integers ≥ 0", error=ConfigError)
    sizes = {"num_running": args.running, "block_size": args.block_size}
    hashing, queues = [], defaultdict(list)
    # First, as in a new process: after 100,000 requests the weight objects are scattered over the heap.
    decode = [bench_decode(**sizes, num_steps=OUTPUT_LEN) for _ in range(args.runs)]
    publishing = [bench_publishing(num_running=args.running, num_steps=100) for _ in range(args.runs)]
    for run in range(args.runs):
        say(f"run {run + 1} of {args.runs}")
        hashing.append(bench_hashing())
        for num_queued in args.queued:
            queues[num_queued].append(bench_queue(**sizes, num_queued=num_queued, num_requests=args.requests))
    per_request = {size: median(one["us_per_request"] for one in runs) for size, runs in queues.items()}
    tokenizer = open_model(EngineConfig()).tokenizer
    assert tokenizer is not None, "only random weights come without one"
    result = {
        "what": "host core per step, instant device; medians over runs; microseconds",
        "running": args.running,
        "prompt_tokens": PROMPT_LEN,
        "output_tokens": OUTPUT_LEN,
        "block_size": args.block_size,
        "runs": args.runs,
        "python": platform.python_version(),
        "decode_step": _medians(decode),
        "step_with_text": _medians(publishing),
        "hash_and_look_up": _medians(hashing),
        "detokenize": bench_detokenizing(tokenizer),
        "us_per_request": per_request,
        "growth": {size: round(value / per_request[args.queued[0]], 3) for size, value in per_request.items()},
        "steps_with_newcomers": {size: _medians([one["step_us"] for one in runs]) for size, runs in queues.items()},
    }
    _show(result)
    write_report(result, args.output)
    return 0


def _medians(runs: list[Any]) -> Any:
    """Return the medians over runs of each number in nested dicts of equal keys."""
    first = runs[0]
    if isinstance(first, dict):
        return {key: _medians([run[key] for run in runs]) for key in first}
    return median(runs)


def _show(result: dict[str, Any]) -> None:
    """Print the table on stderr."""
    say(f"decode step of {result['running']} sequences, µs:")
    for name, values in result["decode_step"].items():
        say(f"  {name:20} p50 {values['p50']:8.1f}  p99 {values['p99']:8.1f}")
    for taken, values in result["step_with_text"].items():
        per_row = values["publish_us_per_row"]
        say(f"  with {taken:15} p50 {values['p50']:8.1f}  p99 {values['p99']:8.1f}  publishing {per_row:.2f} a row")
    for size, value in result["us_per_request"].items():
        say(f"{size:>7} queued: {value:.0f} µs a request, {result['growth'][size]:.2f} × the first queue's")
    plain, with_stop = result["detokenize"].values()
    say(f"text of a token: {plain:.2f} µs, with stop strings {with_stop:.2f}")
    say(f"hash and look up a page of {HASHED_PAGE} tokens: {result['hash_and_look_up']['us_per_page']:.2f} µs")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
