"""`jpaged batch`: answers a file of requests as a server would, in the form of OpenAI's Batch API.

Exit status: 0 if every request succeeded, 1 if the run could not start (one line on stderr) or could not go on (a full
disk), 3 if some lines failed, which the file of errors has then, 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import stat
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..checks import refusal, shown
from ..errors import ConfigError
from .files.lines import LineSource, stat_of
from .flags import FlagParser, add_engine_flags, engine_config, parse_flags
from .process import EXIT_SOME_FAILED, garbage_uncollected, interrupts_held, run_command
from .progress import ProgressReport
from .template_file import read_template

if TYPE_CHECKING:
    from ..config.engine_config import EngineConfig
    from ..startup.open_model import ModelHandle


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jpaged batch` with the arguments `argv`, by default the process's own; return its exit status."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def batch_parser() -> FlagParser:
    """Return the parser of `jpaged batch`; engine options that were not given are no attributes of its result."""
    parser = FlagParser(
        prog="jpaged batch",
        description="Answer a file of requests in the form of OpenAI's Batch API: a line is an object with custom_id, "
        "method, url and body.",
        allow_abbrev=False,
    )
    help = "a .jsonl file with a request per line; - or a pipe too"
    parser.add_argument("-i", "--input", "--input-file", dest="input", metavar="F", required=True, help=help)
    help = "write the responses here, one line per request, in input order"
    parser.add_argument("-o", "--output", "--output-file", dest="output", metavar="F", required=True, help=help)
    help = "write the lines that failed here; default: the output's name with .errors before its suffix"
    parser.add_argument("--error-file", metavar="F", help=help)
    parser.add_argument("--resume", action="store_true", help="go on with what is missing from the output file")
    help = "what bodies may call the model (repeatable); default: as --model"
    parser.add_argument("--served-model-name", metavar="NAME", action="append", help=help)
    parser.add_argument("--chat-template", metavar="F", help="a Jinja template to use instead of the model's")
    help = "refuse what a server with --strict refuses, where a warning would do"
    parser.add_argument("--strict", action="store_true", help=help)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--seed", type=int, default=0, metavar="N", help="seeds the draws of requests without a seed")
    add_engine_flags(engine)
    return parser


def _run(argv: list[str]) -> int:
    """Run the command; return 0, or EXIT_SOME_FAILED if some lines failed.

    Flags, files and the files of the model are checked before weights are loaded. No engine is started if no request is
    left, because every line has a result already, from an earlier run or as an error.
    """
    args = parse_flags(batch_parser(), argv)
    from .files.results import ResultFile

    config = replace(engine_config(args), seed=args.seed)
    input_stat = stat_of(args.input)
    results = ResultFile(Path(args.output), prompt_file=input_stat)
    errors = ResultFile(_error_path(args), prompt_file=input_stat, flag="--error-file")
    if errors.path == results.path:
        raise refusal("--error-file", shown(str(errors.path)), "another file than --output", error=ConfigError)
    template = None if args.chat_template is None else read_template(args.chat_template)
    lines = LineSource(args.input, flag="--input")
    if lines.format == "txt":
        raise refusal("--input", shown(args.input), "a .jsonl file or a pipe of JSON lines", error=ConfigError)
    # This imports JAX, which would crash if an interrupt came during the import.
    with interrupts_held(), garbage_uncollected():
        from ..engine import Engine
        from ..serving.protocols.table import GENERATION_ROUTES
        from ..startup.open_model import open_model
        from .files.batch_lines import batch_jobs, batch_record
        from .files.batch_run import BatchRun, ServedAs
        from .files.resume import FinishedRecords
        from .files.whole_run import compute_and_summarize
        from .summary import SamplingSummary

    with closing(lines), closing(results), closing(errors):
        handle = open_model(config)
        # The time is the same in a run that is resumed.
        is_file = input_stat is not None and stat.S_ISREG(input_stat.st_mode)
        created = int(input_stat.st_mtime) if input_stat is not None and is_file else 0
        served = ServedAs(tuple(args.served_model_name or (config.model,)), created, args.strict)
        options = _options_key(config, handle, template, served.names)
        finished = FinishedRecords(results.path, options, batch_record) if args.resume else None
        run = BatchRun(results, errors, finished, options, served)
        jobs = run.jobs(batch_jobs(lines, tuple(GENERATION_ROUTES), finished))
        first = next((job for job in jobs if job is not None), None)
        if not run.num_lines:
            raise ConfigError(f"--input: {args.input} holds no request; give at least one line")
        if first is None:
            run.start()
        else:
            with (
                closing(ProgressReport()) as progress,
                Engine.from_engine_args(config, handle, progress=progress, keeps_programs=True) as engine,
            ):
                progress.close()
                engine.builder.encoder = replace(engine.builder.encoder, chat_template=template)
                sampling = SamplingSummary({}, handle.sampling_defaults)
                compute_and_summarize(run, engine, deque([first]), jobs, lines, sampling)
        run.finish()
    return EXIT_SOME_FAILED if run.num_failed else 0


def _error_path(args: argparse.Namespace) -> Path:
    """Return the path of the file of errors: out.errors.jsonl beside out.jsonl unless it was given."""
    if args.error_file is not None:
        return Path(args.error_file)
    output = Path(args.output)
    return output.with_name(f"{output.stem}.errors{output.suffix}") if output.name else output


def _options_key(config: EngineConfig, handle: ModelHandle, template: str | None, names: tuple[str, ...]) -> str:
    """Return a hash of all options that results depend on, beside the lines: `--resume` takes over those with it."""
    from .files.resume import options_key

    source, tokenizer = handle.source, handle.tokenizer
    assert source is not None, "a command serves models from files"
    return options_key(
        {
            "command": "batch",
            "model": source.identity,
            "has_random_weights": config.load_format == "dummy",
            "tokenizer": config.tokenizer,
            "hf_overrides": config.hf_overrides,
            "logprobs_mode": config.logprobs_mode,
            "seed": config.seed,
            "tool_call_parser": config.tool_call_parser,
            "reasoning_parser": config.reasoning_parser,
            "names": names,
            "template": template or (tokenizer.chat_template if tokenizer is not None else None),
        }
    )
