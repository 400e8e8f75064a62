"""`jpaged serve`: an OpenAI-compatible server of one model.

Flags, the model's files and the address are checked before weights are loaded: exit status 1, one line on stderr.
SIGTERM and Ctrl-C let open requests end (`--shutdown-timeout`), then the status is 0.
"""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .. import not_available
from ..checks import refusal
from ..config.engine_config import EngineConfig
from ..errors import ConfigError
from .flags import CONVERTERS, FlagParser, add_engine_flags, engine_config, parse_flags
from .process import garbage_uncollected, interrupts_held, run_command
from .progress import ProgressReport, say
from .template_file import read_template

if TYPE_CHECKING:
    from ..async_engine import AsyncEngine
    from ..serving.http.server_state import ServerState, StartedEngine
    from ..startup.open_model import ModelHandle

PACKAGES = ("starlette", "uvicorn", "prometheus_client")
"""Packages of the extra `serve`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jpaged serve` with the arguments `argv`, by default the process's own; return its exit status."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def _run(argv: list[str]) -> int:
    missing_flags = (*not_available.ENGINE_OPTIONS, *not_available.SERVE_OPTIONS)
    args = parse_flags(serve_parser(), argv, missing_flags)
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        way_out = "run: pip install 'jpaged[serve]'"
        raise refusal("serve", f"no package {missing[0]}", "the extra serve", way_out, error=ConfigError)
    from .. import __version__
    from ..async_engine import check_core
    from ..serving.options import ServeOptions, bind

    given = {one.name: value for one in fields(ServeOptions) if (value := getattr(args, one.name)) is not None}
    options, config = ServeOptions(**given), _config(args)
    core = check_core(options.core, config.data_parallel_size, options.core_restarts)
    options = replace(options, core=core)
    if core == "process":
        from ..remote.machine_share import machine_shares

        machine_shares(config)  # Raises for more cores than there are devices for.
    keys = options.read_keys()
    template = None if options.chat_template is None else read_template(options.chat_template)
    listeners = bind(options)
    with interrupts_held():  # With a thread this imports JAX, which would crash if an interrupt came meanwhile.
        from ..serving.http.http_protocol import BACKLOG
        from ..serving.http.server import addresses_of, run_server
        from ..serving.http.server_state import ServerState

        if options.core == "thread":
            from ..startup.open_model import open_model
    handle = open_model(config) if options.core == "thread" else None
    state = ServerState(options, options.served_model_name or (config.model,), config.limits, __version__)
    for listener in listeners:
        listener.listen(BACKLOG)
    _log()
    guarded = f"{len(keys)} key{'s' * (len(keys) != 1)}" if keys else "no key"
    say(f"listening at {addresses_of(options, listeners)} ({guarded})")
    with closing(ProgressReport()) as progress:
        if handle is None:
            start = partial(_start_processes, config, template, state, progress)
        else:
            start = partial(_start_engine, config, handle, template, state, progress)
        return run_server(state, listeners, start, keys=keys)


def _config(args: Namespace) -> EngineConfig:
    """Return the engine's options: the limits of servers are the defaults of this command."""
    from ..serving.options import served_limits

    if args.model_name is not None:
        if "model" in args:
            got = "a model and --model"
            raise refusal("--model", got, "one of them", "leave one out", error=ConfigError)
        args.model = args.model_name
    return replace(engine_config(args), limits=served_limits(getattr(args, "limits", {})), seed=args.seed)


def _start_engine(
    config: EngineConfig, handle: ModelHandle, template: str | None, state: ServerState, progress: ProgressReport
) -> StartedEngine:
    """Make the engine of a server, and the parser of its requests. `state` and `progress` learn how far this is."""
    from ..async_engine import AsyncEngine
    from ..engine import Engine

    with garbage_uncollected():  # Else a collection looks through all of it while programs are compiled behind.
        engine = Engine.from_engine_args(
            config, handle, progress=partial(_report, state, progress), keeps_programs=True, compiles_behind=True
        )
    async_engine = AsyncEngine.from_engine(engine, counts_requests=True)
    progress.close()
    identity = f"{engine.config} {engine.backend.name}"
    return _started(async_engine, state, template, memory=engine.memory, identity=identity)


def _start_processes(
    config: EngineConfig, template: str | None, state: ServerState, progress: ProgressReport
) -> StartedEngine:
    """Let core processes make the engines, and make the parser of their requests here, as `_start_engine` does."""
    from ..async_engine import AsyncEngine
    from ..remote.core_group import CoreGroup

    group = CoreGroup(
        config,
        num_restarts=state.options.core_restarts,
        options={"keeps_programs": True, "compiles_behind": True},
        progress=partial(_report, state, progress),
        watch=state.options.watch,
    )
    progress.close()
    return _started(
        AsyncEngine.from_processes(config, group),
        state,
        template,
        memory=group.memory,
        identity=group.identity,
        builder_setup=group.builder_setup,
    )


def _report(state: ServerState, progress: ProgressReport, name: str, done: int, total: int) -> None:
    """Tell both how far the start is."""
    progress(name, done, total)
    state.report(name, done, total)


def _started(
    engine: AsyncEngine,
    state: ServerState,
    template: str | None,
    *,
    memory: str,
    identity: str,
    builder_setup: bytes | None = None,
) -> StartedEngine:
    """Return an engine with the parsers of its requests, and say that it is ready."""
    from ..serving.http.server_state import StartedEngine
    from ..serving.protocols.parser_process import ParserProcess
    from ..serving.protocols.request_parser import RequestParser

    builder = engine.builder
    if template is not None:
        builder.encoder = replace(builder.encoder, chat_template=template)
    parser = RequestParser(builder, state.model_names, is_strict=state.options.strict)
    say(f"ready: {state.model_names[0]}, {builder.sizes.max_num_seqs} sequences at a time, {memory}")
    return StartedEngine(engine, parser, ParserProcess(parser, builder_setup), f"{identity} {template}")


def _log() -> None:
    """Write the log of the server to stderr: warnings, one line for each request, and at a signal stacks."""
    from ..remote.watchdog import print_stacks_at_signal

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("jpaged")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    print_stacks_at_signal()


def serve_parser() -> FlagParser:
    """Return the parser of `jpaged serve`. Flags that were not given parse to None, engine options to no attribute."""
    from ..serving.options import ServeOptions

    parser = FlagParser(
        prog="jpaged serve", description="Serve a model by OpenAI's HTTP interface.", allow_abbrev=False
    )
    parser.add_argument(
        "model_name", nargs="?", metavar="MODEL", help=EngineConfig.__dataclass_fields__["model"].metadata["help"]
    )
    group = parser.add_argument_group("server")
    for one in fields(ServeOptions):
        options: dict[str, Any] = {"default": None, "help": one.metadata["help"].replace("%", "%%")}
        if one.type == "bool":
            options["action"] = "store_true"
        else:
            metavar = options["metavar"] = one.metadata.get("metavar", "F")
            options["type"] = CONVERTERS.get(metavar, str)
            options["action"] = "append" if str(one.type).startswith("tuple") else "store"
        group.add_argument("--" + one.name.replace("_", "-"), **options)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--seed", type=int, default=0, metavar="N", help="seeds the draws of requests without a seed")
    add_engine_flags(engine)
    return parser
