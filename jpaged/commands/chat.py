"""`jpaged chat`: a conversation with a model, in this process or behind the URL of a server.

Exit status: 0 at the end of the conversation, 1 if it could not start (one line on stderr), 3 if messages came over a
pipe and some got no answer, or a command was wrong, 130 after two interrupts in a row.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..checks import refusal, sent_as
from ..config.engine_config import EngineConfig
from ..errors import ConfigError
from ..sampling.sampling_params import SamplingParams
from .dialog.conversation import Conversation
from .dialog.inputs import PipeInput, TerminalInput
from .dialog.repl import Repl, is_command
from .files.lines import LineSource
from .flags import (
    FLAG_NAMES,
    FlagParser,
    add_engine_flags,
    add_sampling_flags,
    engine_config,
    parse_flags,
    sampling_flags,
)
from .process import garbage_uncollected, interrupts_held, run_command
from .progress import ProgressReport, say
from .template_file import read_template

if TYPE_CHECKING:
    from .dialog.answers import Answerer

KEY_VARIABLE = "OPENAI_API_KEY"
OTHER_PARAMS = ("n", "logprobs", "prompt_logprobs", "beam_width", "length_penalty")
"""Sampling parameters that an answer shown as text cannot have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jpaged chat` with the arguments `argv`, by default the process's own; return its exit status."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def chat_parser() -> FlagParser:
    """Return the parser of `jpaged chat`. Flags that were not given parse to None, engine options to no attribute."""
    parser = FlagParser(
        prog="jpaged chat",
        description="Talk to a model. Each line is a message, at a terminal or of a pipe; answers go to stdout. "
        "/help tells the commands.",
        allow_abbrev=False,
    )
    help = EngineConfig.__dataclass_fields__["model"].metadata["help"]
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help=f"{help}; with --url, as the server calls it")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--chat-template", metavar="F", help="a Jinja template to use instead of the model's")
    server = parser.add_argument_group("server")
    help = "talk to this server, which speaks OpenAI's /v1/chat/completions, instead of loading a model"
    server.add_argument("--url", metavar="URL", help=help)
    help = f"a file whose first line is the server's key; default: the environment variable {KEY_VARIABLE}"
    server.add_argument("--api-key-file", metavar="F", help=help)
    add_sampling_flags(parser.add_argument_group("sampling"), without=OTHER_PARAMS)
    add_engine_flags(parser.add_argument_group("engine"))
    return parser


def _run(argv: list[str]) -> int:
    """Run the command. Raise ConfigError, InvalidRequestError or ModelLoadError if it cannot start."""
    args = parse_flags(chat_parser(), argv)
    params = sampling_flags(args)
    with sent_as(FLAG_NAMES):
        SamplingParams(**params)  # Checks the values.
    for name, stream in ("stdin", sys.stdin), ("stdout", sys.stdout):
        if stream is None:
            raise refusal(name, "a closed one", "an open one", error=ConfigError)
    if args.model_name is not None:
        if "model" in args:
            got = "a model and --model"
            raise refusal("--model", got, "one of them", "leave one out", error=ConfigError)
        args.model = args.model_name
    is_terminal = sys.stdin.isatty()
    source = TerminalInput(is_command) if is_terminal else PipeInput(LineSource("-"))
    with _engine_answers(args, params) if args.url is None else _server_answers(args, params) as answerer:
        if is_terminal:
            say("/help tells the commands, Ctrl-D ends")
        return Repl(answerer, Conversation(args.system), source).run()


@contextmanager
def _server_answers(args: argparse.Namespace, params: Mapping[str, Any]) -> Iterator[Answerer]:
    """Give the model of the server that the flags name."""
    from .dialog.server_answers import ServerAnswers, checked_url

    url = checked_url(args.url)
    local = [one.name for one in fields(EngineConfig) if one.name in args and one.name not in ("model", "seed")]
    if args.chat_template is not None:
        local.append("chat_template")
    if local:
        flag = "--" + local[0].replace("_", "-")
        raise ConfigError(f"{flag}: has no effect with --url, where the server has the model; leave one of them out")
    yield ServerAnswers(url, key=_key(args.api_key_file), model=getattr(args, "model", None), params=params)


def _key(path: str | None) -> str | None:
    """Return the key for a server: that of a file, or of the environment; None without either."""
    if path is not None:
        from ..serving.options import keys_in

        return keys_in(path, "--api-key-file")[0]
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise refusal(KEY_VARIABLE, "a key that is not shown", "printable ASCII without spaces", error=ConfigError)
    return key or None


@contextmanager
def _engine_answers(args: argparse.Namespace, params: Mapping[str, Any]) -> Iterator[Answerer]:
    """Give the model of an engine in this process, of a size for one conversation. Close it at the end."""
    if args.api_key_file is not None:
        raise ConfigError("--api-key-file: has no effect without --url; add that or leave it out")
    config = engine_config(args)
    if "max_num_seqs" not in args:
        config = replace(config, max_num_seqs=1)  # Fewer programs to compile.
    template = None if args.chat_template is None else read_template(args.chat_template)
    with garbage_uncollected():
        with interrupts_held():  # This imports JAX, which would crash if an interrupt came during the import.
            from ..engine import Engine
            from ..sampling.logit_rules_spec import LogitRulesSpec
            from ..sampling.sampling_params import sample_mode
            from ..startup.open_model import open_model
            from ..startup.sizing.sizes import Demand, requested_max_len, requested_max_seqs
            from .dialog.engine_answers import EngineAnswers

        handle = open_model(config)
    rules_spec = LogitRulesSpec(handle.spec.vocab_size)
    encoder = handle.prompt_encoder(config, rules_spec, requested_max_len(config, handle.spec), template)
    if not encoder.template:
        raise ConfigError("chat: the model has no chat template; give --chat-template F, or use jpaged generate")
    with sent_as(FLAG_NAMES):
        asked = SamplingParams(**{"max_tokens": None, **handle.sampling_defaults, **params})
        encoder.params_checker.check(asked, max_logprobs=config.max_logprobs, max_num_seqs=requested_max_seqs(config))
    with (
        closing(ProgressReport()) as progress,
        Engine.from_engine_args(
            config,
            handle,
            demands=[Demand(1, None)],  # One conversation, up to the end of the context.
            modes={sample_mode(asked)},
            progress=progress,
            keeps_programs=True,
        ) as engine,
    ):
        progress.close()
        engine.builder.encoder = replace(engine.builder.encoder, chat_template=template)
        yield EngineAnswers(engine, asked)
