"""The load of `jpaged bench serve`: requests with prompts of their own, and the loops that send them.

A closed loop has a number of clients, each of which sends its next request when its last has ended. An open loop sends
requests at random times whatever the server does. Knows no flags of the command line but their parsed values, and no
statistics.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..progress import say
from .http_client import Server
from .streams import StreamRecord, read_stream
from .workloads import FIXED, load_workload

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
"""Value of --endpoint → its path."""
MAX_WARMUP = 8
ARRIVALS = 1
"""Last part of the seed of arrivals; prompts have seeds without it."""
VOCAB_SIZE = 32_000
"""Drawn token ids are below this by default: nearly every vocabulary in use is at least as large."""
MIN_TOKEN_ID = 100
"""Drawn token ids are at least this if the vocabulary allows: the first ids are often special."""
WORDS = (
    "about", "after", "again", "air", "all", "along", "also", "always", "and", "animal", "another", "answer", "any",
    "around", "ask", "away", "back", "because", "before", "began", "being", "below", "between", "big", "book", "both",
    "boy", "call", "came", "can", "car", "change", "children", "city", "close", "cold", "come", "could", "country",
    "cut", "day", "did", "different", "does", "down", "each", "earth", "eat", "end", "enough", "even", "every", "eye",
    "face", "family", "far", "father", "feet", "few", "find", "first", "follow", "food", "form", "found", "four",
    "friend", "from", "girl", "give", "good", "great", "group", "grow", "had", "half", "hand", "hard", "has", "head",
    "hear", "help", "here", "high", "him", "home", "horse", "house", "how", "idea", "important", "into", "just",
    "keep", "kind", "know", "land", "large", "last", "late", "learn",
)  # fmt: skip
"""Words of drawn texts: most tokenizers have a token for each of them."""


@dataclass(frozen=True)
class Point:
    """A load: a number of clients or a rate of arrivals, and how many requests there are."""

    num_requests: int
    concurrency: int | None = None
    rate: float | None = None
    """Requests per second; infinity: all at once."""

    @property
    def entry(self) -> dict[str, Any]:
        """Return what identifies the point in a report."""
        if self.concurrency is not None:
            return {"concurrency": self.concurrency}
        return {"rate": "inf" if self.rate == math.inf else self.rate}  # JSON has no infinity.

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self.entry.items())


@dataclass(frozen=True)
class PreparedRequest:
    """The bytes of an HTTP request, and its tokens: in, as far as known, and out."""

    data: bytes
    prompt_len: int
    output_len: int


def arrival_times_s(rate: float, count: int, seed: Sequence[int]) -> np.ndarray:
    """Return when the requests of an open loop are sent, in seconds after the first.

    The gaps between them are exponential with the mean 1 ÷ `rate`, which makes the arrivals a Poisson process; they
    depend on nothing but the arguments. With an infinite rate all are sent at once.
    """
    gaps_s = np.random.default_rng([*seed, ARRIVALS]).exponential(1 / rate, count)
    gaps_s[0] = 0.0
    return np.cumsum(gaps_s)


class Load:
    """The requests of one run of a point, all made before the first is sent."""

    def __init__(self, server: Server, args: Namespace, point: Point, seed: list[int]):
        self._server, self._args, self._point, self._seed = server, args, point, seed
        self._rng = np.random.default_rng(seed)
        """Draws prompts."""
        # All points share the prefix: it stands for a system prompt, which a prefix cache has from the first request.
        num_shared = args.shared_prefix_len or 0
        self._prefix = self._draw_prompt(np.random.default_rng(args.seed), num_shared)
        self._requests = self._make_requests(point.num_requests)

    def warm_up(self) -> None:
        """Send the requests that are not counted, as many at a time as there are clients; say if some fail."""
        count = self._args.warmup
        if count is None:
            count = min(self._point.concurrency or MAX_WARMUP, MAX_WARMUP)
        if count == 0:
            return
        say(f"warm-up: {self._point}, {count} requests")
        requests = self._make_requests(count)
        records = asyncio.run(self._closed(requests, self._point.concurrency or MAX_WARMUP))
        if failed := [record for record in records if record.error_kind is not None]:
            say(f"warm-up: {len(failed)} of {count} failed: {failed[0].error_kind}: {failed[0].message}")

    def run(self) -> tuple[list[StreamRecord], float]:
        """Send all requests and wait for their ends; return the records and the processor seconds of this process."""
        start_cpu_s = time.process_time()
        if self._point.concurrency is not None:
            records = asyncio.run(self._closed(self._requests, self._point.concurrency))
        else:
            records = asyncio.run(self._open())
        return records, time.process_time() - start_cpu_s

    async def _closed(self, requests: list[PreparedRequest], num_clients: int) -> list[StreamRecord]:
        """Let clients take the requests in turn, each its next one when its last has ended."""
        records: list[StreamRecord] = []
        queue = iter(requests)

        async def client() -> None:
            for request in queue:
                records.append(await self._send(request, time.perf_counter()))

        await asyncio.gather(*(client() for _ in range(min(num_clients, len(requests)))))
        return records

    async def _open(self) -> list[StreamRecord]:
        """Send each request at its time (`arrival_times_s`), whatever the server does."""
        assert self._point.rate is not None
        arrivals_s = arrival_times_s(self._point.rate, len(self._requests), self._seed)
        start_s = time.perf_counter()
        tasks = []
        for request, due_s in zip(self._requests, start_s + arrivals_s, strict=True):
            wait_s = float(due_s) - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(self._send(request, float(due_s))))
        return await asyncio.gather(*tasks)

    async def _send(self, request: PreparedRequest, due_s: float) -> StreamRecord:
        record = StreamRecord(due_s, request.prompt_len, request.output_len)
        options = {"has_event_usage": self._args.event_usage, "timeout_s": self._args.timeout}
        await read_stream(self._server, request.data, record, **options)
        return record

    def _make_requests(self, count: int) -> list[PreparedRequest]:
        """Return new requests with prompts that no request had before, except for what they are to share.

        A fixed workload keeps its token ids but the first of each prompt, which is replaced by one that is drawn for
        the run. So no page is in a prefix cache from an earlier run, and what the prompts share stays shared.
        """
        args = self._args
        prompts: list[list[Any]]
        if args.prompt_len is not None:
            output_lens = (args.output_len,) * count
            own_len = args.prompt_len - len(self._prefix)
            prompts = [self._prefix + self._draw_prompt(self._rng, own_len) for _ in range(count)]
        else:
            vocab_size = args.vocab_size or (sys.maxsize if args.workload in FIXED else VOCAB_SIZE)
            workload = load_workload(args.workload, vocab_size=vocab_size, num_requests=count)
            output_lens = workload.output_lens
            if args.workload in FIXED:
                first = self._draw_prompt(self._rng, 1)
                prompts = [first + list(prompt[1:]) for prompt in workload.prompts]
            else:
                prompts = [self._draw_prompt(self._rng, len(prompt)) for prompt in workload.prompts]
        return [self._request(prompt, output_len) for prompt, output_len in zip(prompts, output_lens, strict=True)]

    def _draw_prompt(self, rng: np.random.Generator, length: int) -> list[Any]:
        """Return random words or token ids."""
        if self._args.prompts == "words":
            return [WORDS[index] for index in rng.integers(0, len(WORDS), length)]
        vocab_size = self._args.vocab_size or VOCAB_SIZE
        return rng.integers(min(MIN_TOKEN_ID, vocab_size // 2), vocab_size, length).tolist()

    def _request(self, prompt: list[Any], output_len: int) -> PreparedRequest:
        """Return the HTTP request that asks for `output_len` tokens after a prompt of words or token ids."""
        args = self._args
        text, is_chat = " ".join(prompt) if args.prompts == "words" else prompt, args.endpoint == "chat"
        prompt_field = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        stream_options = {"include_usage": True} | ({"continuous_usage_stats": True} if args.event_usage else {})
        fields = {"max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps({"model": args.model, **prompt_field, **fields, "stream_options": stream_options}).encode()
        return PreparedRequest(self._server.request("POST", PATHS[args.endpoint], body), len(prompt), output_len)
