"""`jpaged serve`: an OpenAI-compatible server of one model.

Flags, the model's files and the address are checked before weights are loaded: exit status 1, one line on stderr.
SIGTERM and Ctrl-C let open requests end (`--shutdown-timeout`), then the status is 0.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .. import not_available
from ..checks import refusal
from ..config.engine_config import EngineConfig
from ..errors import ConfigError
from .flags import FlagParser, add_engine_flags, engine_config, parse_flags
from .process import interrupts_held, run_command
from .progress import ProgressReport, say

if TYPE_CHECKING:
    from ..async_engine import AsyncEngine
    from ..serving.http.server_state import ServerState
    from ..serving.protocols.front import Front

PACKAGES = ("starlette", "uvicorn", "prometheus_client")
"""Packages of the extra `serve`."""
SWITCHES = ("enable_admin", "strict", "vllm_metrics", "disable_log_requests")
REPEATABLE = ("api_key", "served_model_name", "allowed_origins")
METAVARS = {"port": "N", "shutdown_timeout": "S", "host": "HOST", "uds": "PATH", "otlp_traces_endpoint": "URL"}


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
    from ..serving.options import ServeOptions, listen, served_limits

    if args.model_name is not None:
        if "model" in args:
            got = "a model and --model"
            raise refusal("--model", got, "one of them", "leave one out", error=ConfigError)
        args.model = args.model_name
    given = {one.name: value for one in fields(ServeOptions) if (value := getattr(args, one.name)) is not None}
    options = ServeOptions(**given)
    keys = options.keys()
    if not hasattr(args, "warmup"):
        args.warmup = "full"
    config = engine_config(args)
    config = replace(config, limits=served_limits(getattr(args, "limits", {})), seed=args.seed)
    template = None
    if options.chat_template is not None:
        from .generate import read_template

        template = read_template(options.chat_template)
    listener = listen(options)
    with interrupts_held():  # This imports JAX, which would crash if an interrupt came during the import.
        from ..serving.http.server import address_of, run_server
        from ..serving.http.server_state import ServerState
        from ..startup.open_model import open_model
    handle = open_model(config)
    names = options.served_model_name or (config.model,)
    state = ServerState(options, names, config.limits, __version__)
    listener.listen(2048)
    _log()
    guarded = f"{len(keys)} key{'s' * (len(keys) != 1)}" if keys else "no key"
    say(f"listening at {address_of(options, listener)} ({guarded})")
    progress = ProgressReport()

    def start(state: ServerState) -> tuple[AsyncEngine, Front, str]:
        """Make the engine and its front."""
        from ..async_engine import AsyncEngine
        from ..engine import Engine
        from ..serving.protocols.front import Front

        def report(name: str, done: int, total: int) -> None:
            progress(name, done, total)
            state.report(name, done, total)

        engine = Engine.from_engine_args(config, handle, progress=report)
        progress.close()
        if template is not None:
            engine.builder.encoder = replace(engine.builder.encoder, chat_template=template)
        front = Front(engine.builder, names, is_strict=options.strict)
        identity = f"{config.model} {engine.config.dtype} {engine.backend.name}"
        say(f"ready: {names[0]}, {engine.step_sizes.max_num_seqs} sequences at a time, {engine.memory}")
        return AsyncEngine.from_engine(engine, stat_loggers=[state.metrics]), front, identity

    try:
        return run_server(state, listener, start)
    finally:
        progress.close()


def _log() -> None:
    """Write the log of the server to stderr: warnings, and one line for each request."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("jpaged")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


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
        flag = "--" + one.name.replace("_", "-")
        text = one.metadata["help"].replace("%", "%%")
        options: dict[str, Any] = {"default": None, "help": text}
        if one.name in SWITCHES:
            options["action"] = "store_true"
        elif one.name in REPEATABLE:
            options |= {"action": "append", "metavar": "TEXT"}
        else:
            options["metavar"] = METAVARS.get(one.name, "F")
            if one.name in ("port", "shutdown_timeout"):
                options["type"] = int if one.name == "port" else float
        group.add_argument(flag, **options)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--seed", type=int, default=0, metavar="N", help="seeds the draws of requests without a seed")
    add_engine_flags(engine)
    return parser
