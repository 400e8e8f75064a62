"""A server in a process of its own, over a device that computes nothing, and its client, for the benches of serving.

The server has the engine's own host core, in a thread or in a process. Its device's steps take so many milliseconds
each, and give the tokens of a script where the prompt names one (`SCRIPTS`), else always the same token.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jpaged import __version__
from jpaged.config.engine_config import EngineConfig
from jpaged.engine import Engine

sys.path.insert(0, str(Path(__file__).parent))
from scheduler import instant_runner

CONTEXT = 512
TOKEN_TEXT = b"()"
"""Text of the token that the device always draws."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SCRIPTS = {
    "content": ("", "()"),
    "thought": ("<think>", "()"),
    "call": ('<tool_call>\n{"name": "note", "arguments": {"text": "', "()"),
    "newlines": ("", "\n"),
}
"""Name of a script → what the device writes behind a prompt that holds `script:NAME`: a text, then one token's text,
again and again."""
ANSWERS_TEMPLATE = """\
{%- if tools %}Call <tool_call>{"name": "…", "arguments": {…}}</tool_call>:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{#- </think> #}"""
"""A template of a model that thinks and calls tools, whose marks are no tokens of the built-in tokenizer."""


class PacedRunner:
    """A runner each of whose steps ends so many seconds after the one before, and notes when it did."""

    def __init__(self, engine: Engine, step_s: float, ends_file: str):
        """The ends of steps go to a file, eight bytes each, as floats in seconds of the monotonic clock."""
        self._ends_file = os.open(ends_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._core, self._runner, self._step_s = engine.core, instant_runner(engine.core.builder), step_s
        assert engine.tokenizer is not None
        self._tokenizer = engine.tokenizer
        self._scripts: dict[str, tuple[list[int], int] | None] = {}
        """The core's id of a request → the first tokens of its script, and the one behind them."""
        self._end_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def dispatch(self, step: Any) -> Any:
        self._end_s = max(self._end_s, time.monotonic()) + self._step_s
        return _PacedOutputs(self._runner.dispatch(step), self._end_s, self)

    def note_end(self, end_s: float) -> None:
        """Write the end of a step, at once: a core process ends without any last call."""
        os.write(self._ends_file, np.float64(end_s).tobytes())

    def scripted(self, sampled: Any) -> Any:
        """Return the rows of the oldest step in flight with the next tokens of the scripts of their requests."""
        token_ids = np.array(sampled.token_ids)
        for row, sample in enumerate(self._core.in_flight[0].rows.samples):
            request = sample.request
            if request.request_id not in self._scripts:
                self._scripts[request.request_id] = self._script(request.prompt_token_ids)
            if (script := self._scripts[request.request_id]) is not None:
                place = sample.num_output_tokens
                token_ids[..., row] = script[0][place] if place < len(script[0]) else script[1]
        return replace(sampled, token_ids=token_ids)

    def _script(self, prompt: Sequence[int]) -> tuple[list[int], int] | None:
        text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
        name = next((name for name in SCRIPTS if f"script:{name}" in text), None)
        if name is None:
            return None
        head, repeated = (self._tokenizer.encode(one, add_special_tokens=False) for one in SCRIPTS[name])
        assert len(repeated) == 1
        return head, repeated[0]


class _PacedOutputs:
    """The outputs of a step, which can be read once the step has ended."""

    columns = None

    def __init__(self, outputs: Any, end_s: float, runner: PacedRunner):
        self._outputs, self._end_s, self._runner = outputs, end_s, runner

    def read(self) -> Any:
        time.sleep(max(0.0, self._end_s - time.monotonic()))
        self._runner.note_end(self._end_s)
        sampled = self._outputs.read()
        return None if sampled is None else self._runner.scripted(sampled)

    def read_scores(self) -> Any:
        return self._outputs.read_scores()


def make_paced(
    config: EngineConfig,
    progress: Any,
    *,
    step_ms: float,
    context: int,
    max_num_seqs: int,
    ends_file: str,
    cached_pages: int,
) -> Engine:
    """Return an engine whose device computes nothing: what a core process calls, too.

    It has a prefix cache and `cached_pages` more pages, if that is not 0.
    """
    engine = Engine(
        load_format="dummy",
        hf_overrides={"num_hidden_layers": 1, "max_position_embeddings": context},
        warmup="off",
        max_num_seqs=max_num_seqs,
        max_model_len=context,
        num_decode_steps=1,
        block_size=16,
        num_blocks=1 + max(max_num_seqs * CONTEXT, context) // 16 + cached_pages,
        limits=config.limits,
        enable_prefix_caching=cached_pages > 0,
    )
    engine.core.runner = PacedRunner(engine, step_ms / 1e3, ends_file)  # type: ignore[assignment]
    return engine


def serve(port_file: str, core: str, num_cores: str, template: str, paced: str) -> int:
    """Run the server. `template` may be empty: the model's. `paced` is JSON, the options of `make_paced`."""
    from jpaged.async_engine import AsyncEngine
    from jpaged.serving.http.server import run_server
    from jpaged.serving.http.server_state import ServerState, StartedEngine
    from jpaged.serving.options import ServeOptions, bind, served_limits
    from jpaged.serving.protocols.parser_process import ParserProcess
    from jpaged.serving.protocols.request_parser import RequestParser

    options = ServeOptions(port=0, disable_log_requests=True, shutdown_timeout=0.0, core=core)
    config = EngineConfig(limits=served_limits({}), data_parallel_size=int(num_cores))
    listeners = bind(options)
    state = ServerState(options, ("bench",), config.limits, __version__)

    def start() -> StartedEngine:
        setup: bytes | None = None
        if core == "process":
            from jpaged.remote.core_group import CoreGroup

            client = CoreGroup(config, maker="served_process:make_paced", options=json.loads(paced))
            engine, setup = AsyncEngine.from_processes(config, client), client.builder_setup
        else:
            made = make_paced(config, None, **json.loads(paced))
            engine = AsyncEngine.from_engine(made, counts_requests=True)
        if template:
            engine.builder.encoder = replace(engine.builder.encoder, chat_template=template)
        Path(port_file).write_text(str(listeners[0].getsockname()[1]))
        parser = RequestParser(engine.builder, ("bench",))
        return StartedEngine(engine, parser, ParserProcess(parser, setup), "bench")

    return run_server(state, listeners, start)


class Stream(asyncio.Protocol):
    """One streamed request, and when each of its events has come."""

    def __init__(self, body: bytes, path: str):
        head = (
            b"POST %b HTTP/1.1\r\n" % path.encode()
            + b"Host: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        self._request = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        self.times_s: list[float] = []
        self.data: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.times_s.append(time.monotonic())
        self.data.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set_result(None)

    @property
    def token_times_s(self) -> list[float]:
        """Return when each token has come, by the text that the one token of this device has."""
        return [when for when, data in zip(self.times_s, self.data, strict=True) for _ in range(data.count(TOKEN_TEXT))]


async def stream_all(port: int, bodies: Sequence[bytes], path: str = "/v1/completions") -> list[Stream]:
    """Send requests at once, and return them when all have ended."""
    loop = asyncio.get_running_loop()
    streams = [Stream(body, path) for body in bodies]
    for stream in streams:
        await loop.create_connection(partial(_same, stream), "127.0.0.1", port)
    for stream in streams:
        await stream.done
    return streams


def _same(stream: Stream) -> Stream:
    return stream


def cpu_s(pid: int) -> np.ndarray:
    """Return the processor time that a process has taken, in seconds: all of it, and that of its first thread."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    thread_ns = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]
    return np.array([(int(fields[11]) + int(fields[12])) / TICKS_PER_S, int(thread_ns) / 1e9])


class Server:
    """The server's process, and those of its cores if they are others."""

    def __init__(
        self,
        folder: Path,
        step_ms: float,
        context: int,
        template: str = "",
        *,
        core: str = "thread",
        num_cores: int = 1,
        rows: int = 64,
        cached_pages: int = 0,
    ):
        """`rows` is the number of sequences that a step of a core computes at most. See `make_paced`."""
        port, self._ends = folder / "port", folder / "ends"
        paced = {"step_ms": step_ms, "context": context, "max_num_seqs": rows, "ends_file": str(self._ends)}
        paced["cached_pages"] = cached_pages
        command = [sys.executable, __file__, port, core, str(num_cores), template, json.dumps(paced)]
        self.process = subprocess.Popen(command)
        atexit.register(self.process.kill)
        while not port.exists() or not port.read_text():
            time.sleep(0.05)
            assert self.process.poll() is None, "the server has ended"
        self.port = int(port.read_text())
        time.sleep(0.5)  # The listener takes connections already; the engine begins to serve meanwhile.

    @property
    def pids(self) -> list[int]:
        """Return the ids of the server's process and of its core's."""
        children = [int(pid) for path in Path(f"/proc/{self.process.pid}/task").glob("*/children")
                    for pid in path.read_text().split()]  # fmt: skip
        cores = [pid for pid in children if b"core_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return [self.process.pid, *cores]

    def cpu_s(self) -> float:
        """Return the processor time of the server and of its core, in seconds."""
        return float(sum(cpu_s(pid)[0] for pid in self.pids))

    def stop(self) -> np.ndarray:
        """End the server; return the ends of its steps, in seconds of the monotonic clock."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0
        return np.fromfile(self._ends)


def quantiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    found = {f"p{q}": round(float(np.percentile(values, q)), 2) for q in (50, 99)}
    return {**found, "max": round(float(np.max(values)), 2)}


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[1:]))
