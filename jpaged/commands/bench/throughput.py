"""`jpaged bench throughput`: whole workloads, beside what bounds the engine and what else there is.

`bench latency` is the same bench with workload A, one stream, by default; here they are B and C, many requests.
Everything that is compared computes the same workloads (workloads.py): the same token ids, as many output tokens as the
workload says, greedily where no other sampling is named. Runs are interleaved, so that each run has one measurement of
every baseline on every workload. Medians are shown, ratios first: how many times as fast the engine is.

    replay          the engine's own programs on the inputs they had, back to back, without the host
    bare            the same steps without attention, cache and host: what products and logits alone take
    dense           static batches of 16, padded, over a dense cache
    sync            the engine with --no-async-scheduling
    one-step        the engine with --num-decode-steps 1
    deterministic   the engine with --deterministic
    drawn, …, mixed the same engine with requests of one kind of sampling, or of all kinds in rotation
    --peer          another engine, or another checkout of this one, behind a command (peer.py, scripts/peers)
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from ...checks import check, integer, one_of, refusal, shown
from ...config.engine_config import EngineConfig
from ...engine import Engine
from ...errors import ConfigError
from ...startup.open_model import ModelHandle, open_model
from ..flags import FlagParser, add_engine_flags, engine_config
from ..progress import say
from .baselines import SAMPLING, BareBaseline, Baseline, DenseBaseline, RecordedEngine, ReplayBaseline
from .peer import PeerBaseline
from .report import add_report_flags, machine, parse_bench, write_report
from .workloads import WORKLOADS, Workload, load_workload

ENGINE = "jpaged"
OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "sync": {"async_scheduling": False},
    "one-step": {"num_decode_steps": 1},
    "deterministic": {"deterministic": True},
}
"""Baselines that are the engine with other options."""
VERSUS = ("replay", "bare", "dense", *OTHER_OPTIONS, *SAMPLING)
DEFAULT_WORKLOADS = {"latency": ["A"], "throughput": ["B", "C"]}
MIN_MODEL_LEN = 2048
"""Context in tokens that the engine is built for, unless a workload needs more or the user gives another: the same
that the peers of scripts/peers are built for."""

Seconds = dict[str, dict[str, list[float]]]
"""Seconds of each run, by workload and baseline."""


def bench(kind: str, argv: Sequence[str]) -> int:
    """Run `jpaged bench latency` or `throughput`, as `kind` says, with the arguments `argv`; return the status 0.

    Times the engine and the baselines of `--versus` and `--peer` on the workloads. A table goes to stderr, the report
    in JSON to stdout or the file of `--output`. Raises ConfigError if a flag is wrong, or if `--max-model-len` is too
    short for a workload.
    """
    args = _parse(kind, argv)
    config = engine_config(args)
    handle = open_model(config)
    vocab_size = handle.spec.vocab_size
    workloads = [
        load_workload(name, vocab_size=vocab_size, num_requests=count)
        for name in args.workload
        for count in args.num_requests or [None]
    ]
    if args.num_requests and len(args.num_requests) > 1:
        # Results are kept by name, so each number of requests needs its own, such as "B, 8".
        workloads = [replace(workload, name=f"{workload.name}, {len(workload.prompts)}") for workload in workloads]
    max_len = max(workload.max_len for workload in workloads)
    if config.max_model_len is None:
        config = replace(config, max_model_len=max(max_len, min(MIN_MODEL_LEN, handle.spec.max_context_len)))
    elif config.max_model_len < max_len:
        raise ConfigError(f"max_model_len: got {config.max_model_len}, the workloads need {max_len}; raise it")
    if config.max_num_seqs is None:  # As many as DENSE_ROWS, so that all baselines batch alike.
        config = replace(config, max_num_seqs=16)
    with ExitStack() as stack:
        baselines = _baselines(config, handle, args, stack)
        result = _result(kind, config, baselines, workloads, _measure(baselines, workloads, args.runs))
    _show(result)
    write_report(result, args.output)
    return 0


def _parse(kind: str, argv: Sequence[str]) -> Namespace:
    """Return the parsed flags of the bench `kind`; ConfigError if a value is not allowed.

    The default workloads depend on `kind`; all other flags are the same for both benches, and engine flags are among
    them. A name in `--peer NAME=COMMAND` must differ from the engine's and the baselines' names.
    """
    about = "whole workloads, beside what bounds the engine and what else there is."
    description = f"`jpaged bench latency` and `bench throughput`: {about}"
    parser = FlagParser(prog=f"jpaged bench {kind}", description=description, allow_abbrev=False)
    help = f"any of {', '.join(WORKLOADS)}"
    parser.add_argument("--workload", nargs="+", default=DEFAULT_WORKLOADS[kind], metavar="NAME", help=help)
    help = "only the first N of each workload; with several N, each is a workload"
    parser.add_argument("--num-requests", type=int, nargs="+", metavar="N", help=help)
    help = f"any of {', '.join(VERSUS)}; default: bare"
    parser.add_argument("--versus", nargs="*", default=["bare"], metavar="NAME", help=help)
    help = "another engine to time in turns (repeatable)"
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help=help)
    add_report_flags(parser, 5, "interleaved runs")
    add_engine_flags(parser.add_argument_group("engine"))
    args = parse_bench(parser, argv)
    for count in args.num_requests or ():  # None, if the flag was not given, means all requests.
        check("--num-requests", count, integer(1), error=ConfigError)
    for name in args.versus:
        check("--versus", name, one_of(*VERSUS), error=ConfigError)
    for peer in args.peer:
        name, _, command = peer.partition("=")
        if not (name and command) or name in (ENGINE, *VERSUS):
            raise refusal("--peer", shown(peer), "NAME=COMMAND with a name of its own", error=ConfigError)
    return args


def _baselines(config: EngineConfig, handle: ModelHandle, args: Namespace, stack: ExitStack) -> dict[str, Baseline]:
    """Return everything that is timed, by name: the engine first, then the baselines of `--versus` and the peers.

    Engines and peer processes are started here; `stack` closes them at its end. Each baseline of OTHER_OPTIONS has an
    engine of its own; the others share the first engine or its weights. Only what `--versus` names is made. Raises
    ConfigError if a peer cannot be started, or for "dense" with a model on several devices.
    """

    def new_engine(**options: Any) -> RecordedEngine:
        """Start an engine with these options in place of the flags'."""
        return RecordedEngine(stack.enter_context(Engine.from_engine_args(replace(config, **options), handle)))

    ours = new_engine()
    if "dense" in args.versus and ours.engine.mesh.size > 1:
        raise refusal(
            "--versus", "dense over several devices", "others, or --tensor-parallel-size 1", error=ConfigError
        )
    makers: dict[str, Callable[[], Baseline]] = {
        "replay": lambda: ReplayBaseline(ours),
        "bare": lambda: BareBaseline(ours),
        "dense": lambda: DenseBaseline(ours.runner.weights, handle.spec),
        **{name: partial(new_engine, **options) for name, options in OTHER_OPTIONS.items()},
        **{name: partial(RecordedEngine, ours.engine, sampling) for name, sampling in SAMPLING.items()},
    }
    baselines: dict[str, Baseline] = {ENGINE: ours, **{name: makers[name]() for name in args.versus}}
    for peer in args.peer:
        name, _, command = peer.partition("=")
        say(f"{name}: starting")
        baselines[name] = stack.enter_context(closing(PeerBaseline(name, command, ours.engine.step_sizes.max_num_seqs)))
    return baselines


def _measure(baselines: dict[str, Baseline], workloads: list[Workload], num_runs: int) -> Seconds:
    """Run every baseline on every workload `num_runs` times, in turns; return the seconds of each run.

    The engine, which is the first of `baselines`, comes first in each turn: some baselines repeat its last run. A first
    run of each is not counted, because it compiles. Each run's tokens/s go to stderr.
    """
    seconds: Seconds = defaultdict(lambda: defaultdict(list))
    for run in range(-1, num_runs):  # Run −1 is the one that is not counted.
        for workload in workloads:
            for name, baseline in baselines.items():
                run_s = baseline.run(workload)
                if run >= 0:
                    seconds[workload.name][name].append(run_s)
                what = f"run {run + 1} of {num_runs}" if run >= 0 else "first run, not counted"
                say(f"{what}: {workload.name}, {name}: {workload.num_output_tokens / run_s:.1f} tokens/s")
    return seconds


def _result(
    kind: str, config: EngineConfig, baselines: dict[str, Baseline], workloads: list[Workload], seconds: Seconds
) -> dict[str, Any]:
    """Return the report, to be written as JSON: ratios and rates first, then how they were measured.

    `seconds` are those of every run, by workload and baseline; `config` has the options that the engine was started
    with. A ratio such as "jpaged ÷ bare" is the engine's speed divided by the baseline's: above 1 the engine is faster.
    This runs every workload once more on the engine, for its latencies and padding.
    """
    ours = baselines[ENGINE]
    assert isinstance(ours, RecordedEngine)
    medians = {name: {key: median(values) for key, values in times.items()} for name, times in seconds.items()}
    engine, sizes = ours.engine, ours.engine.step_sizes
    return {
        "what": f"{kind}: output tokens/s of whole workloads; medians of interleaved runs",
        "ratios": {
            name: {f"{ENGINE} ÷ {key}": round(times[key] / times[ENGINE], 3) for key in times if key != ENGINE}
            for name, times in medians.items()
        },
        "tokens_per_s": {
            each.name: {key: round(each.num_output_tokens / run_s, 1) for key, run_s in medians[each.name].items()}
            for each in workloads
        },
        "details": {workload.name: _details(ours, workload) for workload in workloads},
        "workloads": {workload.name: workload.description for workload in workloads},
        "seconds": {
            name: {key: [round(run_s, 4) for run_s in values] for key, values in times.items()}
            for name, times in seconds.items()
        },
        "peers": {name: one.ready for name, one in baselines.items() if isinstance(one, PeerBaseline)},
        "runs": len(seconds[workloads[0].name][ENGINE]),
        "command": shlex.join(["jpaged", "bench", *sys.argv[2:]]),
        "model": config.model,
        "dtype": sizes.dtype,
        "max_num_seqs": sizes.max_num_seqs,
        "max_num_batched_tokens": sizes.max_num_batched_tokens,
        "attention": engine.backend.name,
        "recompiles": engine.stats()["recompiles"],
        **machine(engine.device),
    }


def _details(ours: RecordedEngine, workload: Workload) -> dict[str, Any]:
    """Run the workload on the engine once more; return its latencies, padding and number of steps.

    Median and worst latencies are over the requests, in seconds; the time to the first token counts from the request's
    arrival. The time per output token of a request leaves out the first token; requests with one output token have
    none, and it is null if all have one. Padded ÷ true tokens are counted apart for steps that only decode and for
    steps with prompts: 1 means no padding.
    """
    ours.run(workload)
    first_s = [each.first_token_time - each.arrival_time for each in ours.metrics if each.first_token_time is not None]
    between_s = [
        (metrics.last_token_time - metrics.first_token_time) / (out - 1)
        for metrics, out in zip(ours.metrics, workload.output_lens, strict=True)
        if metrics.first_token_time is not None and metrics.last_token_time is not None and out > 1
    ]
    padding = {kind: round(ours.padded_tokens[kind] / ours.true_tokens[kind], 3) for kind in ours.true_tokens}
    return {
        "time_to_first_token_s": _median_and_worst(first_s, 4),
        "time_per_output_token_s": _median_and_worst(between_s, 5),
        "padded ÷ true tokens": padding,
        "steps": len(ours.shapes),
    }


def _median_and_worst(seconds: list[float], digits: int) -> dict[str, float] | None:
    return {"median": round(median(seconds), digits), "worst": round(max(seconds), digits)} if seconds else None


def _show(result: dict[str, Any]) -> None:
    """Print rates, ratios and padding of each workload of a report (`_result`) on stderr.

    Each baseline has a line such as "  jpaged ÷ bare  0.93   (bare 1234.5 tokens/s)".
    """
    for name, ratios in result["ratios"].items():
        rates = result["tokens_per_s"][name]
        say(f"{name}: {ENGINE} {rates[ENGINE]} tokens/s")
        for key, ratio in ratios.items():
            other = key.removeprefix(f"{ENGINE} ÷ ")
            say(f"  {key:28} {ratio:6.2f}   ({other} {rates[other]} tokens/s)")
        say(f"  padded ÷ true tokens: {result['details'][name]['padded ÷ true tokens']}")


main = partial(bench, "throughput")
