"""A server in this process whose model writes what a test says.

Engine, steps, prompts and grammars are the real ones of a tiny model. Only the tokens that its steps give are replaced
by those of a script, which is found by a text of the prompt.
"""

import asyncio
import json
import socket
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jpaged import Engine
from jpaged.async_engine import AsyncEngine
from jpaged.config.engine_config import EngineConfig
from jpaged.remote.core_group import CoreGroup
from jpaged.request import Request
from jpaged.serving.http.app import make_app
from jpaged.serving.http.http_protocol import uvicorn_config
from jpaged.serving.http.server import LimitedServer
from jpaged.serving.http.server_state import ServerState, StartedEngine
from jpaged.serving.options import ServeOptions, served_limits
from jpaged.serving.protocols.parser_process import ParserProcess
from jpaged.serving.protocols.request_parser import RequestParser

from ..tiny_model import CONFIG

SPECIALS = ("<|end|>", "<|start|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own that the text shows, as in Qwen3's tokenizers."""
TEMPLATE = """\
{%- if tools %}<|start|>system: Call <tool_call>{"name": "…", "arguments": {…}}</tool_call> with one of:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}<|start|>{{ m.role }}: {% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or "" }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant: {% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
SIZES: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 2048, "max_model_len": 4096, "block_size": 16, "num_blocks": 1025,
    "warmup": "off",
}  # fmt: skip


def write_scripted_model(directory: Path, *, template: str = TEMPLATE, max_model_len: int = 4096) -> Path:
    """Write a model of one layer, without weights, whose tokenizer has a token for each byte and for each mark."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        **CONFIG,
        "vocab_size": tokenizer.get_vocab_size(),
        "num_hidden_layers": 1,
        "max_position_embeddings": max_model_len,
    }
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


Script = str | Sequence[str]
"""What the model writes, `<|end|>` included; or one such text for each sample."""


class SavedScripts(UserDict[str, Script]):
    """Scripts that a core process reads too: a file holds them."""

    def __init__(self, path: Path):
        self.path = path
        super().__init__()

    def __setitem__(self, text: str, script: Script) -> None:
        super().__setitem__(text, script)
        self.path.write_text(json.dumps(self.data))


class ScriptedRunner:
    """A runner whose sampled rows hold the next tokens of scripts."""

    def __init__(self, engine: Engine, scripts: Callable[[], Mapping[str, Script]]):
        """`scripts` returns a text → what is written behind a prompt that holds it last."""
        self._core, self._runner, self._scripts = engine.core, engine.core.runner, scripts
        assert engine.tokenizer is not None
        self._tokenizer = engine.tokenizer
        self._found: dict[tuple[str, int], list[int]] = {}
        """Id of a request and index of a sample → the tokens of its script."""
        self.requests: dict[str, Request] = {}
        """All requests that have got tokens, by their ids."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def dispatch(self, step: Any) -> Any:
        return _ScriptedOutputs(self._runner.dispatch(step), self)

    def sample(self, step: Any, outputs: Any, masks: Any) -> Any:
        return _ScriptedOutputs(self._runner.sample(step, outputs.outputs, masks), self)

    def scripted(self, sampled: Any) -> Any:
        """Return the sampled rows of the oldest step in flight with the tokens of the scripts."""
        token_ids = np.array(sampled.token_ids)
        rows = token_ids if token_ids.ndim == 2 else token_ids[None]
        for row, sample in enumerate(self._core.in_flight[0].rows.samples):
            key = sample.request.request_id, sample.index
            if key not in self._found:
                self._found[key] = self._script(sample)
                self.requests[key[0]] = sample.request
            script = self._found[key]
            for index in range(len(rows)):
                place = sample.num_output_tokens + index
                rows[index, row] = script[place] if place < len(script) else 0
        return replace(sampled, token_ids=rows if token_ids.ndim == 2 else rows[0])

    def _script(self, sample: Any) -> list[int]:
        prompt = self._tokenizer.decode(list(sample.request.prompt_token_ids), skip_special_tokens=False)
        scripts = self._scripts()
        key = max(scripts, key=lambda text: (prompt.rfind(text), len(text)))
        assert key in prompt, "a prompt without a script"
        script = scripts[key]
        text = script if isinstance(script, str) else script[sample.index]
        return self._tokenizer.encode(text, add_special_tokens=False)


class _ScriptedOutputs:
    """The outputs of a step, whose tokens are replaced when they are read."""

    def __init__(self, outputs: Any, runner: ScriptedRunner):
        self.outputs, self._runner = outputs, runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outputs, name)

    def read(self) -> Any:
        sampled = self.outputs.read()
        return None if sampled is None else self._runner.scripted(sampled)


class Scripted(NamedTuple):
    """A server of a scripted model, whose name is `scripted`."""

    url: str
    scripts: SavedScripts
    """A text of a prompt → what the model writes behind a prompt that holds it last."""


def scripted_core(config: EngineConfig, progress: Any, *, scripts: str) -> Engine:
    """Return the engine of a core process, whose scripts are in a file."""
    engine = Engine.from_engine_args(config, progress=progress)
    engine.core.runner = ScriptedRunner(engine, lambda: json.loads(Path(scripts).read_text()))  # type: ignore[assignment]
    return engine


@contextmanager
def saved_scripts_server(directory: Path, scripts: SavedScripts, *, core: str = "") -> Iterator[str]:
    """Serve as `scripted_server` does; with `core="process"` the engine is in a process of its own."""
    if core != "process":
        with scripted_server(directory, scripts) as url:
            yield url
        return
    config = EngineConfig(model=str(directory), load_format="dummy", **SIZES, limits=served_limits({}))
    maker = f"{__name__}:{scripted_core.__name__}"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[3])  # Where core processes find the tests.
        client = CoreGroup(config, maker=maker, options={"scripts": str(scripts.path)})
    served = ServeOptions(disable_log_requests=True)
    with _serving(AsyncEngine.from_processes(config, client), served) as url:
        yield url


@contextmanager
def scripted_server(
    directory: Path,
    scripts: Mapping[str, Script],
    *,
    is_strict: bool = False,
    requests: dict[str, Request] | None = None,
    **options: Any,
) -> Iterator[str]:
    """Serve a model that was written by `write_scripted_model`, as `scripted`; give the server's URL.

    `requests` takes all requests that have got tokens, by their ids. `options` are the engine's.
    """
    served = ServeOptions(strict=is_strict, disable_log_requests=True)
    with Engine(str(directory), load_format="dummy", **{**SIZES, "limits": served_limits({}), **options}) as engine:
        runner = ScriptedRunner(engine, lambda: scripts)
        engine.core.runner = runner  # type: ignore[assignment]
        runner.requests = runner.requests if requests is None else requests
        with _serving(AsyncEngine.from_engine(engine), served) as url:
            yield url


@contextmanager
def _serving(engine: AsyncEngine, options: ServeOptions) -> Iterator[str]:
    """Serve an engine; give the server's URL."""
    state = ServerState(options, ("scripted",), served_limits({}), "0")
    parser = RequestParser(engine.builder, ("scripted",), is_strict=options.strict)
    state.serve(StartedEngine(engine, parser, ParserProcess(parser), "scripted"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = LimitedServer(uvicorn_config(make_app(state, ()), served_limits({})))
        thread = threading.Thread(target=lambda: asyncio.run(_serve(server, state, listener)), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


async def _serve(server: LimitedServer, state: ServerState, listener: socket.socket) -> None:
    beat = asyncio.create_task(state.beat())
    await server.serve([listener])
    beat.cancel()
    await state.close()
