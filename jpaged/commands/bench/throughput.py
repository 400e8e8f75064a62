"""`jpaged bench latency` and `bench throughput`: whole workloads, beside what bounds the engine and what else there is.

Everything that is compared computes the same token ids, greedily, as many tokens as the workload says, in turns within
one run; medians are shown, ratios first: how many times as fast the engine is. What may stand beside it:

    replay      the engine's own programs on the inputs they had, back to back, without the host
    bare        the same steps without attention, cache and host: what products and logits alone take
    dense       static batches of 16, padded, over a dense cache
    sync        the engine with --no-async-scheduling
    one-step    the engine with --num-decode-steps 1
    deterministic   the engine with --deterministic
    drawn, mixed    the engine, whose requests are not greedy, or every kind of request by turns
    --peer      another engine, behind a command: see PeerContender
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import jax

from .config import EngineConfig
from .contenders import (
    DRAWN,
    GREEDY,
    MIXED,
    BareContender,
    Contender,
    DenseContender,
    EngineContender,
    PeerContender,
    ReplayContender,
)
from .engine import Engine
from .errors import ConfigError
from .flags import FlagParser, add_engine_flags, engine_config
from .opening import open_for_engine
from .progress import say
from .workloads import WORKLOADS, Workload, load_workload

ENGINE = "jpaged"
OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "sync": {"async_scheduling": False},
    "one-step": {"num_decode_steps": 1},
    "deterministic": {"deterministic": True},
}
OTHER_KINDS: dict[str, tuple[dict[str, Any], ...]] = {"drawn": (DRAWN,), "mixed": MIXED}
VERSUS = ("replay", "bare", "dense", *OTHER_OPTIONS, *OTHER_KINDS)
DEFAULTS = {"latency": (["A"], ["bare"]), "throughput": (["B", "C"], ["bare"])}
"""Workloads, and what they are compared with."""
LEAST_MODEL_LEN = 2048
"""Context that the engine is made for, if no workload needs more and none is given: what its peers are given."""


def main(kind: str, argv: Sequence[str]) -> int:
    """Run the bench of that kind, latency or throughput; the table goes to stderr, the JSON to stdout or a file."""
    args = _parse(kind, argv)
    config = engine_config(args)
    opened = open_for_engine(config)
    vocab_size = opened.config.vocab_size
    workloads = [load_workload(name, vocab_size=vocab_size, num_requests=args.num_requests) for name in args.workload]
    longest = max(workload.longest for workload in workloads)
    if config.max_model_len is None:
        least = min(LEAST_MODEL_LEN, opened.config.max_position_embeddings)
        config = replace(config, max_model_len=max(longest, least))
    elif config.max_model_len < longest:
        raise ConfigError(f"max_model_len: got {config.max_model_len}, the workloads need {longest}; raise it")
    if config.max_num_seqs is None:
        config = replace(config, max_num_seqs=16)
    with ExitStack() as stack:
        contenders = _contenders(config, opened, args, stack)
        seconds = _measure(contenders, workloads, args.runs)
        result = _result(kind, config, contenders, workloads, seconds, args.runs)
    _show(result)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    if args.output:
        args.output.write_text(text + "\n")
    else:
        print(text)
    return 0


def _parse(kind: str, argv: Sequence[str]) -> Namespace:
    parser = FlagParser(prog=f"jpaged bench {kind}", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    workloads, versus = DEFAULTS[kind]
    parser.add_argument(
        "--workload", nargs="+", default=workloads, metavar="NAME", help=f"any of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--num-requests", type=int, metavar="N", help="only the first N of each workload")
    parser.add_argument(
        "--versus", nargs="*", default=versus, metavar="NAME", help=f"any of {', '.join(VERSUS)}; default: bare"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another engine to time in turns (repeatable)",
    )
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs; medians are shown")
    parser.add_argument("-o", "--output", type=Path, help="write the JSON here")
    add_engine_flags(parser.add_argument_group("engine"))
    args = parser.parse_args(list(argv))
    for name in ("runs", "num_requests"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: got {value}, allowed: an integer ≥ 1")
    for name in args.versus:
        if name not in VERSUS:
            raise ConfigError(f"--versus: got {name!r}, allowed: {', '.join(VERSUS)}")
    for peer in args.peer:
        name, equals, command = peer.partition("=")
        if not (name and equals and command) or name in (ENGINE, *VERSUS):
            raise ConfigError(f"--peer: got {peer!r}, allowed: NAME=COMMAND with a name of its own")
    if args.output and not args.output.absolute().parent.is_dir():
        raise ConfigError(f"--output: got {args.output}, allowed: a file in a folder that there is")
    return args


def _contenders(config: EngineConfig, opened: Any, args: Namespace, stack: ExitStack) -> dict[str, Contender]:
    """Everything that is timed, by name, the engine first. What `stack` holds is closed with it."""

    def engine_of(*kinds: dict[str, Any], **options: Any) -> EngineContender:
        engine = stack.enter_context(Engine.from_engine_args(replace(config, **options), opened))
        return EngineContender(engine, kinds or (GREEDY,))

    ours = engine_of()
    contenders: dict[str, Contender] = {ENGINE: ours}
    for name in args.versus:
        if name == "replay":
            contenders[name] = ReplayContender(ours)
        elif name == "bare":
            contenders[name] = BareContender(ours)
        elif name == "dense":
            model = opened.config
            shape = model.num_layers, model.num_kv_heads, model.head_size
            contenders[name] = DenseContender(ours.engine.runner.weights, *shape)
        elif name in OTHER_KINDS:
            contenders[name] = engine_of(*OTHER_KINDS[name])
        else:
            contenders[name] = engine_of(**OTHER_OPTIONS[name])
    for peer in args.peer:
        name, _, command = peer.partition("=")
        say(f"{name}: starting")
        contender = PeerContender(name, command, ours.engine.sizes.max_num_seqs)
        stack.callback(contender.close)
        contenders[name] = contender
    return contenders


def _measure(
    contenders: dict[str, Contender], workloads: list[Workload], num_runs: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds by workload and contender, one after the other in every run. A first run of each is not counted."""
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in range(-1, num_runs):
        for workload in workloads:
            for name, contender in contenders.items():
                taken = contender.run(workload)
                if run >= 0:
                    seconds[workload.name][name].append(taken)
                what = f"run {run + 1} of {num_runs}" if run >= 0 else "first run, not counted"
                say(f"{what}: {workload.name}, {name}: {workload.num_out / taken:.1f} tokens/s")
    return seconds


def _result(
    kind: str,
    config: EngineConfig,
    contenders: dict[str, Contender],
    workloads: list[Workload],
    seconds: dict[str, dict[str, list[float]]],
    num_runs: int,
) -> dict[str, Any]:
    ours = contenders[ENGINE]
    assert isinstance(ours, EngineContender)
    medians = {name: {key: median(values) for key, values in times.items()} for name, times in seconds.items()}
    details = {workload.name: _details(ours, workload) for workload in workloads}
    engine = ours.engine
    return {
        "what": f"{kind}: output tokens/s of whole workloads; medians of interleaved runs",
        "ratios": {
            name: {
                f"{ENGINE} ÷ {key}": round(taken / times[ENGINE], 3) for key, taken in times.items() if key != ENGINE
            }
            for name, times in medians.items()
        },
        "tokens_per_s": {
            workload.name: {key: round(workload.num_out / taken, 1) for key, taken in medians[workload.name].items()}
            for workload in workloads
        },
        "details": details,
        "workloads": {workload.name: workload.what for workload in workloads},
        "seconds": {
            name: {key: [round(taken, 4) for taken in values] for key, values in times.items()}
            for name, times in seconds.items()
        },
        "peers": {name: one.ready for name, one in contenders.items() if isinstance(one, PeerContender)},
        "runs": num_runs,
        "command": shlex.join(["jpaged", "bench", *sys.argv[2:]]),
        "model": config.model,
        "dtype": engine.sizes.dtype,
        "max_num_seqs": engine.sizes.max_num_seqs,
        "max_num_batched_tokens": engine.sizes.max_num_batched_tokens,
        "attention": engine.backend.name,
        "recompiles": engine.stats()["recompiles"],
        "device": engine.device.device_kind,
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "date": date.today().isoformat(),
    }


def _details(ours: EngineContender, workload: Workload) -> dict[str, Any]:
    """What only the engine can tell of a workload, from one more run: time to first token, and padding."""
    ours.run(workload)
    first = [one.first_token_time - one.arrival_time for one in ours.metrics if one.first_token_time is not None]
    between = [
        (one.last_token_time - one.first_token_time) / (out - 1)
        for one, out in zip(ours.metrics, workload.outs, strict=True)
        if one.first_token_time is not None and one.last_token_time is not None and out > 1
    ]
    padding = {kind: round(ours.padded_tokens[kind] / ours.true_tokens[kind], 3) for kind in ours.true_tokens}
    return {
        "time_to_first_token_s": {"median": round(median(first), 4), "worst": round(max(first), 4)},
        "time_per_output_token_s": {"median": round(median(between), 5), "worst": round(max(between), 5)},
        "padded ÷ true tokens": padding,
        "steps": len(ours.steps),
    }


def _processor() -> str:
    """What the machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _show(result: dict[str, Any]) -> None:
    for name, ratios in result["ratios"].items():
        rates = result["tokens_per_s"][name]
        say(f"{name}: {ENGINE} {rates[ENGINE]} tokens/s")
        for key, ratio in ratios.items():
            other = key.removeprefix(f"{ENGINE} ÷ ")
            say(f"  {key:28} {ratio:6.2f}   ({other} {rates[other]} tokens/s)")
        say(f"  padded ÷ true tokens: {result['details'][name]['padded ÷ true tokens']}")
