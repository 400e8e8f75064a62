"""Measures two core processes behind one server beside a single one: tokens per second, and what their caches find.

    python scripts/bench/replicas.py -o docs/measurements/replicas.json      # about three minutes

The cores' devices compute nothing; their steps take so many milliseconds each. `jpaged bench serve` streams 64 requests
to each core. Then 50 chats begin at once, of which each sends its next turn once it has the last answer, and at last 64
equal prompts come at once. Shares of tokens that caches have found, and what each core has computed, are differences
of /metrics.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from scheduler import DRAWN_TOKEN
from served_process import Server

from jpaged.commands.bench.report import add_report_flags, host_machine, parse_bench, write_report
from jpaged.commands.flags import FlagParser
from jpaged.commands.process import run_command
from jpaged.commands.progress import say

CONTEXT, CACHED_PAGES = 2048, 4096
NUM_STREAMS, PROMPT_LEN, OUTPUT_LEN = 64, 32, 256
"""Streams of each core, and their tokens."""
NUM_CHATS, NUM_TURNS, SYSTEM_LEN = 50, 6, 64
QUESTION_LEN, ANSWER_LEN = 118, 32
"""Tokens of a turn, 150 together."""
NUM_EQUAL, EQUAL_LEN = 64, 600
VOCAB_SIZE = 40_000


def streamed(server: Server, num_cores: int) -> float:
    """Return the tokens per second that `jpaged bench serve` gets."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        load = ["--concurrency", NUM_STREAMS * num_cores, "--num-requests", 2 * NUM_STREAMS * num_cores]
        sizes = ["--prompt-len", PROMPT_LEN, "--output-len", OUTPUT_LEN, "--vocab-size", VOCAB_SIZE]
        url = f"http://127.0.0.1:{server.port}"
        flags = ["--base-url", url, *load, *sizes, "-o", report.name]
        command = [sys.executable, "-m", "jpaged", "bench", "serve", *map(str, flags)]
        subprocess.run(command, check=True, capture_output=True)
        point = json.loads(Path(report.name).read_text())["points"][0]
    assert point["succeeded"] == 2 * NUM_STREAMS * num_cores, point
    return float(point["output_tokens_per_s"])


async def complete(server: Server, prompt: Sequence[int]) -> None:
    """Send a prompt of token ids, and wait until its answer is there."""
    fields = {"model": "bench", "prompt": list(prompt), "max_tokens": ANSWER_LEN, "ignore_eos": True, "temperature": 0}
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
    response = await reader.read()
    writer.close()
    assert response.startswith(b"HTTP/1.1 200"), response[:500]


async def chat(server: Server, system: Sequence[int], random: np.random.Generator) -> None:
    """Hold a conversation: each turn sends all that was said before."""
    history = list(system)
    for _ in range(NUM_TURNS):
        history += random.integers(100, VOCAB_SIZE, QUESTION_LEN).tolist()
        await complete(server, history)
        history += [DRAWN_TOKEN] * ANSWER_LEN


async def chats(server: Server, seed: int) -> None:
    """Hold all conversations, which have one system prompt, at once."""
    random = np.random.default_rng(seed)
    system = random.integers(100, VOCAB_SIZE, SYSTEM_LEN).tolist()
    await asyncio.gather(*(chat(server, system, one) for one in random.spawn(NUM_CHATS)))


async def equal_prompts(server: Server, seed: int) -> None:
    """Send one prompt many times at once."""
    prompt = np.random.default_rng(seed).integers(100, VOCAB_SIZE, EQUAL_LEN).tolist()
    await asyncio.gather(*(complete(server, prompt) for _ in range(NUM_EQUAL)))


def counters(server: Server) -> dict[str, dict[str, float]]:
    """Return the counters of each core by its number."""
    text = urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.type == "counter" and "engine" in sample.labels:
                name = sample.name.removeprefix("jpaged:")
                of_core = found[sample.labels["engine"]]
                of_core[name] = of_core.get(name, 0.0) + sample.value
    return found


def counted(server: Server, load: Any) -> dict[str, Any]:
    """Return the share of prompt tokens that caches have found under a load, and how evenly cores have worked."""
    before = counters(server)
    asyncio.run(load)
    cores = [
        {name: value - before[core][name] for name, value in found.items()} for core, found in counters(server).items()
    ]
    tokens = [
        one["prompt_tokens_total"] - one["prefix_cache_hits_total"] + one["generation_tokens_total"] for one in cores
    ]
    requests = [one["request_success_total"] for one in cores]
    hits, queries = (sum(one[f"prefix_cache_{name}_total"] for one in cores) for name in ("hits", "queries"))
    return {
        "hit": round(hits / queries, 3),
        "computed_tokens": tokens,
        "requests": requests,
        "most ÷ least loaded": round(max(max(one) / max(1, min(one)) for one in (tokens, requests)), 2),
    }


def measured(num_cores: int, step_ms: float, seed: int) -> dict[str, Any]:
    """Return what a server of so many cores does under the three loads."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"core": "process", "num_cores": num_cores, "cached_pages": CACHED_PAGES}
        server = Server(Path(folder), step_ms, CONTEXT, **options)
        found = {
            "output_tokens_per_s": round(streamed(server, num_cores), 1),
            "chats": counted(server, chats(server, seed)),
            "equal prompts": counted(server, equal_prompts(server, seed + 1)),
        }
        server.stop()
    return found


def main(argv: Sequence[str]) -> int:
    """Measure one core and two in turns; write the report."""
    parser = FlagParser(prog="replicas.py", description="Measure two core processes beside one.")
    parser.add_argument("--step-ms", type=float, default=20.0, metavar="X", help="milliseconds of a step")
    add_report_flags(parser, 3, "runs of both")
    args = parse_bench(parser, argv)
    runs = []
    for run in range(args.runs):
        one, two = (measured(num_cores, args.step_ms, 1000 * run) for num_cores in (1, 2))
        ratios = {
            "tokens/s, two ÷ one": round(two["output_tokens_per_s"] / one["output_tokens_per_s"], 3),
            "hit of chats, two ÷ one": round(two["chats"]["hit"] / one["chats"]["hit"], 3),
            "chats, most ÷ least loaded": two["chats"]["most ÷ least loaded"],
            "equal prompts, most ÷ least loaded": two["equal prompts"]["most ÷ least loaded"],
        }
        runs.append({**ratios, "one": one, "two": two})
        say(f"run {run + 1} of {args.runs}: {ratios}")
    names = [name for name in runs[0] if name not in ("one", "two")]
    medians = {name: round(median(run[name] for run in runs), 3) for name in names}
    write_report({**medians, "step_ms": args.step_ms, "each_run": runs, **host_machine()}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
