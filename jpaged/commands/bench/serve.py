"""`jpaged bench serve`: a load of streamed requests on any OpenAI-compatible server, and the times of its tokens.

The server may be jpaged's, vLLM's or llama.cpp's: the same client measures all of them over HTTP. A point is a number
of clients, each of which sends its next request when its last has ended (`--concurrency`, a closed loop), or a rate at
which requests arrive whatever the server does (`--rate`, an open loop with Poisson arrivals). Every request is greedy,
ignores ends of sequences and asks for a given number of tokens; prompts are new in each run of each point, so that a
prefix cache helps only where `--shared-prefix-len` or workload C shares a prefix. A request that fails is counted as an
error and is in no time and no rate.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import shlex
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from ...checks import check, integer, number, one_of, refusal, shown
from ...errors import ConfigError
from ..flags import CONVERTERS, FlagParser
from ..process import EXIT_FAILED
from ..progress import say
from .http_client import RequestFailedError, Server, get_json
from .report import add_report_flags, host_machine, parse_bench, write_report
from .serve_load import MAX_WARMUP, PATHS, VOCAB_SIZE, Load, Point
from .streams import StreamRecord
from .workloads import EQUAL, FIXED, WORKLOADS, load_workload

NUM_REQUESTS, REQUESTS_PER_CLIENT = 64, 4
"""A point's requests by default: NUM_REQUESTS, or REQUESTS_PER_CLIENT for each client if that is more."""
CHECK_S = 30.0
"""Seconds that the server may take to name its models."""
NUM_SPARE_FILES = 100
"""File descriptors that the process needs besides those of its connections."""
PERCENTILES = (50, 90, 99)
STATISTICS = (*(f"p{q}" for q in PERCENTILES), "mean", "max")
"""What is reported of each kind of time."""
TABLE_ROWS = {
    "first token": "time_to_first_token_s",
    "between tokens": "between_tokens_s",
    "between events": "between_events_s",
    "per output token": "time_per_output_token_s",
    "request": "request_s",
    "send lateness": "send_lateness_s",
}
"""Title of a row of the table → its key in the report."""
METRIC_DESCRIPTIONS = {
    "time_to_first_token_s": "from when the connection begins to be opened to the first event with text or a token",
    "between_tokens_s": "gap between two events with text, divided by the tokens of the later one where each event "
    "tells them, else by the mean tokens of the request's events (usage at its end); see tokens_counted_by",
    "between_events_s": "gap between two events with text, of one token or several",
    "time_per_output_token_s": "of a request: (last event − first event) ÷ tokens after the first event",
    "request_s": "from when the connection begins to be opened to [DONE]",
    "send_lateness_s": "open loop: from when a request was due to when its connection began to be opened",
    "rates": "of requests that succeeded, from the first send to the last end",
}
"""What the numbers of a report mean."""


def main(argv: Sequence[str]) -> int:
    """Run `jpaged bench serve` with the arguments `argv`; return 0, or 1 if all requests of a point failed in a run.

    A table goes to stderr, the report in JSON to stdout or the file of `--output`. Raises ConfigError if a flag is
    wrong or the server cannot be reached.
    """
    args = _parse(argv)
    server, points = Server.from_url(args.base_url, args.api_key), _points(args)
    server, args.model = asyncio.run(_reach(server, args.model))
    _allow_files(max(point.concurrency or point.num_requests for point in points))
    runs: list[list[dict[str, Any]]] = [[] for _ in points]
    for run in range(args.runs):
        for index, point in enumerate(points):
            load = Load(server, args, point, [args.seed, index, run])
            if run == 0:
                load.warm_up()
            say(f"run {run + 1} of {args.runs}: {point}, {point.num_requests} requests")
            runs[index].append(_measurement(point, *load.run()))
    entries = [_merged(point_runs) for point_runs in runs]
    _show(entries)
    write_report(_report(args, entries, runs), args.output)
    return EXIT_FAILED if any(run["succeeded"] == 0 for point_runs in runs for run in point_runs) else 0


def _parse(argv: Sequence[str]) -> Namespace:
    """Return the parsed flags; ConfigError if a value or a combination is not allowed.

    `seed`, `workload` and `prompts` are set, to what they default to where they were not given.
    """
    description = "Measure an OpenAI-compatible server: jpaged's, vLLM's, llama.cpp's."
    parser = FlagParser(prog="jpaged bench serve", description=description, allow_abbrev=False)
    to_integer, to_number = CONVERTERS["N"], CONVERTERS["X"]

    def add(name: str, metavar: str, help: str, **options: Any) -> None:
        parser.add_argument(name, metavar=metavar, help=help, **options)

    add("--base-url", "URL", "where the server is; default: %(default)s", default="http://127.0.0.1:8000")
    add("--model", "NAME", "model to ask for; default: the first that the server names")
    add("--api-key", "K", "key that the server asks for")
    add("--endpoint", "NAME", f"{' or '.join(PATHS)}; default: %(default)s", default="completions")
    add("--concurrency", "N", "closed loop: clients; with several N, each is a point", type=to_integer, nargs="+")
    add("--rate", "X", "open loop: requests/s, or inf; with several X, each is a point", type=to_number, nargs="+")
    help = f"requests of each point; default: {NUM_REQUESTS}, or {REQUESTS_PER_CLIENT} per client if that is more"
    add("--num-requests", "N", help, type=to_integer)
    help = f"requests before each point that are not counted; default: one per client, at most {MAX_WARMUP}"
    add("--warmup", "N", help, type=to_integer)
    add("--workload", "NAME", f"one of {', '.join(WORKLOADS)}; default: sharegpt")
    add("--prompt-len", "N", "tokens (or words) of each prompt, instead of a workload", type=to_integer)
    add("--output-len", "N", "tokens of each output, with --prompt-len", type=to_integer)
    add("--shared-prefix-len", "N", "tokens (or words) that all prompts of --prompt-len begin with", type=to_integer)
    add("--prompts", "FORM", "ids (random token ids) or words (random text); default: ids, for chat words")
    add("--vocab-size", "N", f"drawn token ids are below N; default: {VOCAB_SIZE}", type=to_integer)
    help = "ask for the tokens so far in each event (continuous_usage_stats), at a cost to the server"
    parser.add_argument("--event-usage", action="store_true", help=help)
    add(
        "--timeout",
        "S",
        "seconds after which a request has failed; default: %(default)s",
        type=to_number,
        default=600.0,
    )
    add(
        "--seed",
        "N",
        "seeds prompts and arrivals; default: a new one, so that no prefix cache helps",
        type=to_integer,
    )
    add_report_flags(parser, 1, "measurements of each point, in turns")
    args = parse_bench(parser, argv, "num_requests", "prompt_len", "output_len", "vocab_size")
    check("--endpoint", args.endpoint, one_of(*PATHS), error=ConfigError)
    check("--timeout", args.timeout, number(0, open_min=True), error=ConfigError)
    if (args.concurrency is None) == (args.rate is None):
        got = "neither it nor --rate" if args.rate is None else "--rate too"
        raise refusal("--concurrency", got, "one of the two", "such as --concurrency 1 4 16", error=ConfigError)
    for value in args.concurrency or ():
        check("--concurrency", value, integer(1), error=ConfigError)
    for value in args.rate or ():
        check("--rate", value, number(0, math.inf, open_min=True), error=ConfigError)
    for name, value in ("--warmup", args.warmup), ("--seed", args.seed):
        if value is not None:
            check(name, value, integer(0), error=ConfigError)
    _check_prompts(args)
    if args.seed is None:
        args.seed = int.from_bytes(os.urandom(4))
    return args


def _check_prompts(args: Namespace) -> None:
    """Check the flags that say what is asked, and set `workload` and `prompts` where they were not given."""

    def refuse(flag: str, got: str, way_out: str) -> ConfigError:
        return ConfigError(f"{flag}: {got}; {way_out}", param=flag)

    if (args.prompt_len is None) != (args.output_len is None):
        flag, other = ("--output-len", "--prompt-len") if args.prompt_len is None else ("--prompt-len", "--output-len")
        raise refuse(flag, f"has no effect without {other}", "give both or neither")
    if args.prompt_len is None:
        if args.shared_prefix_len is not None:
            raise refuse("--shared-prefix-len", "has no effect without --prompt-len", "give both, or --workload C")
        args.workload = args.workload or "sharegpt"
        check("--workload", args.workload, one_of(*WORKLOADS), error=ConfigError)
    else:
        if args.workload is not None:
            raise refuse("--workload", "has no effect with --prompt-len", "leave one of them out")
        if args.shared_prefix_len is not None:  # Each prompt needs a token of its own.
            check("--shared-prefix-len", args.shared_prefix_len, integer(0, args.prompt_len - 1), error=ConfigError)
    allowed = ["words"] if args.endpoint == "chat" else ["ids"] if args.workload in FIXED else ["ids", "words"]
    args.prompts = args.prompts or allowed[0]
    if args.workload in FIXED and args.endpoint == "chat":
        got = f"{args.workload}, which is token ids, with --endpoint chat, which takes text"
        raise refusal("--workload", got, ", ".join(("sharegpt", *EQUAL)), "or --prompt-len", error=ConfigError)
    if args.prompts not in allowed:
        raise refusal("--prompts", shown(args.prompts), " or ".join(allowed) + " here", error=ConfigError)
    if args.vocab_size is not None and args.prompts == "words":
        raise refuse("--vocab-size", "has no effect on words", "leave it out")


def _points(args: Namespace) -> list[Point]:
    """Return the points in the order of the flags, each with its number of requests.

    Raises ConfigError if a fixed workload has fewer requests than `--num-requests`, or if a point has more clients than
    requests.
    """
    available = None
    if args.workload in FIXED:
        available = len(load_workload(args.workload, vocab_size=args.vocab_size or sys.maxsize).prompts)
        if args.num_requests is not None:
            check("--num-requests", args.num_requests, integer(1, available), error=ConfigError)
    loads = [Point(0, concurrency=value) for value in args.concurrency or ()]
    loads += [Point(0, rate=value) for value in args.rate or ()]

    def count(point: Point) -> int:
        return args.num_requests or available or max(NUM_REQUESTS, REQUESTS_PER_CLIENT * (point.concurrency or 0))

    points = [replace(point, num_requests=count(point)) for point in loads]
    for point in points:
        if point.concurrency is not None and point.concurrency > point.num_requests:
            way_out = "raise --num-requests" if available is None else "or another workload"
            allowed = f"at most the number of requests, {point.num_requests}"
            raise refusal("--concurrency", point.concurrency, allowed, way_out, error=ConfigError)
    return points


async def _reach(server: Server, model: str | None) -> tuple[Server, str]:
    """Return the server with the address that answers, and the model: `model`, or the first that the server names.

    Raises ConfigError if the server cannot be reached, or if it names no model and none was given.
    """
    path = "/v1/models"
    try:
        async with asyncio.timeout(CHECK_S):
            server = await server.resolved()
        if model is not None:
            return server, model
        status, answer = await get_json(server, path, timeout_s=CHECK_S)
    except (OSError, RequestFailedError) as error:
        reason = f"no answer in {CHECK_S:g} s" if isinstance(error, TimeoutError) else error
        raise ConfigError(f"--base-url: {server.url} cannot be reached: {reason}; start the server first") from error
    if status in (401, 403):
        raise ConfigError(f"--api-key: {server.url}{path} answers status {status}; give the server's key")
    try:
        return server, str(answer["data"][0]["id"])
    except (LookupError, TypeError):
        reason = f"answers status {status}" if status != 200 else "names no model"
        raise ConfigError(f"--model: {server.url}{path} {reason}; name the model") from None


def _allow_files(num_connections: int) -> None:
    """Raise the process's soft limit of open files, as far as the hard limit allows, to what a point needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + NUM_SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def _measurement(point: Point, records: list[StreamRecord], cpu_s: float) -> dict[str, Any]:
    """Return what a run of a point has measured, under the keys of the report. Times are of successes only.

    `cpu_s` is the processor time of this process during the run.
    """
    passed = [record for record in records if record.error_kind is None]
    failed = [record for record in records if record.error_kind is not None]
    sent_s = np.sort([record.sent_s for record in records])
    ended_s = np.sort([record.end_s for record in records])
    duration_s = float(ended_s[-1] - sent_s[0])
    in_flight = np.arange(1, len(records) + 1) - np.searchsorted(ended_s, sent_s, side="right")
    num_output_tokens = sum(record.num_output_tokens for record in passed)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in passed)
    num_events = sum(len(record.event_times_s) for record in passed)
    lateness_s = [[record.sent_s - record.due_s] for record in records] if point.rate is not None else []
    return {
        **point.entry,
        "requests": len(records),
        "succeeded": len(passed),
        "errors": dict(Counter(str(record.error_kind) for record in failed)),
        "error_examples": {str(record.error_kind): record.message for record in reversed(failed)},
        "duration_s": round(duration_s, 4),
        "requests_per_s": round(len(passed) / duration_s, 3),
        "output_tokens_per_s": round(num_output_tokens / duration_s, 2),
        "prompt_tokens_per_s": round(num_prompt_tokens / duration_s, 2),
        "output_tokens": num_output_tokens,
        "prompt_tokens": num_prompt_tokens,
        "requests_of_other_lengths": sum(record.num_output_tokens != record.output_len for record in passed),
        "tokens_per_event": round(num_output_tokens / num_events, 3) if num_events else None,
        "tokens_counted_by": dict(Counter(record.tokens_counted_by for record in passed)),
        "max_in_flight": int(np.max(in_flight)),
        "time_to_first_token_s": _statistics([[record.event_times_s[0] - record.sent_s] for record in passed]),
        "between_tokens_s": _statistics([_between_tokens_s(record) for record in passed]),
        "between_events_s": _statistics([np.diff(record.event_times_s) for record in passed]),
        "time_per_output_token_s": _statistics([_time_per_output_token_s(record) for record in passed]),
        "request_s": _statistics([[record.end_s - record.sent_s] for record in passed]),
        "send_lateness_s": _statistics(lateness_s),
        "client_cpu_s": round(cpu_s, 4),
        "client_cpu_share": round(cpu_s / duration_s, 4),
    }


def _between_tokens_s(record: StreamRecord) -> np.ndarray:
    """Return the seconds from each token to the next: the gap before an event, divided by the event's tokens.

    If the events tell their tokens, an event of n tokens gives n values; for example, a gap of 0.06 s before 3 tokens
    gives three times 0.02 s. Otherwise each gap gives one value: it is divided by the mean tokens of the events.
    """
    gaps_s = np.diff(record.event_times_s)
    if record.tokens_counted_by == "each event":
        counts = np.array(record.event_tokens[1:], int)
        return np.repeat(gaps_s / counts, counts)
    return gaps_s * (len(record.event_times_s) / record.num_output_tokens)


def _time_per_output_token_s(record: StreamRecord) -> list[float]:
    """Return the mean seconds of a request's tokens after those of its first event; no value if there are none."""
    count = record.num_output_tokens - max(record.event_tokens[0], 1)
    return [(record.event_times_s[-1] - record.event_times_s[0]) / count] if count > 0 else []


def _statistics(parts: Sequence[Sequence[float] | np.ndarray]) -> dict[str, float] | None:
    """Return percentiles, mean and maximum of the values in all parts; None if there is no value."""
    values = np.concatenate([np.zeros(0), *parts])
    if not values.size:
        return None
    found = {f"p{q}": np.percentile(values, q) for q in PERCENTILES} | {"mean": values.mean(), "max": values.max()}
    return {name: round(float(value), 6) for name, value in found.items()}


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of the numbers of several runs, also in nested objects; of texts, the first.

    A value that is missing or None in some runs is that of the others.
    """
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run[key] for run in runs if run.get(key) is not None]
        if not values or isinstance(values[0], str):
            found[key] = values[0] if values else None
        elif isinstance(values[0], dict):
            found[key] = _medians(values)
        else:
            middle = median(values)
            is_whole = isinstance(values[0], int) and middle == int(middle)
            found[key] = int(middle) if is_whole else middle
    return found


def _merged(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the runs of a point as one entry of the report: medians, but the errors of all runs together."""
    errors: Counter[str] = Counter()
    for run in runs:
        errors.update(run["errors"])
    return {**_medians(runs), "errors": dict(errors)}


def _report(args: Namespace, points: list[dict[str, Any]], runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the report, to be written as JSON: the points first, then how they were measured.

    `runs` are those of each point, one after another.
    """
    words = ["jpaged", "bench", *sys.argv[2:]]
    if args.api_key is not None:
        words = [word.replace(args.api_key, "…") for word in words]
    return {
        "what": "serve: streamed requests over HTTP; medians of interleaved runs, errors of all runs",
        "points": points,
        "measured": METRIC_DESCRIPTIONS,
        "runs": args.runs,
        "each_run": [{"run": index + 1, **run} for point_runs in runs for index, run in enumerate(point_runs)],
        "command": shlex.join(words),
        "base_url": args.base_url,
        "model": args.model,
        "endpoint": args.endpoint,
        "workload": args.workload or "drawn",
        "prompt_len": args.prompt_len,
        "output_len": args.output_len,
        "shared_prefix_len": args.shared_prefix_len,
        "prompts": args.prompts,
        "seed": args.seed,
        **host_machine(),
    }


def _show(points: Sequence[dict[str, Any]]) -> None:
    """Print the rates, errors and times of each point on stderr."""
    for point in points:
        load = next(f"{name} {point[name]}" for name in ("concurrency", "rate") if name in point)
        say(
            f"{load}: {point['output_tokens_per_s']:.1f} output tokens/s, {point['prompt_tokens_per_s']:.1f} prompt "
            f"tokens/s, {point['requests_per_s']:.2f} requests/s, client {point['client_cpu_share']:.0%} of a core"
        )
        errors = ", ".join(f"{count} × {kind}" for kind, count in point["errors"].items())
        if errors:
            kind, message = next(iter(point["error_examples"].items()))
            say(f"  errors: {errors}; for example {kind}: {message}")
        if point["tokens_counted_by"]:
            say(f"  {point['tokens_per_event']} tokens per event, counted by {' or '.join(point['tokens_counted_by'])}")
        if point["requests_of_other_lengths"]:
            say(f"  {point['requests_of_other_lengths']:g} requests have another number of tokens than was asked for")
        say("  " + "ms".ljust(18) + "".join(name.rjust(11) for name in STATISTICS))
        for title, name in TABLE_ROWS.items():
            if point[name] is not None:
                say("  " + title.ljust(18) + "".join(f"{1e3 * point[name][key]:11.2f}" for key in STATISTICS))
