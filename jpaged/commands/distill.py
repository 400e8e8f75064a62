"""`jpaged distill`: a model's most likely tokens of many sequences, as a directory that a student trains from.

Exit status: 0 if every line is in the directory, 1 if the run could not start or go on (one line on stderr), 3 if some
lines were wrong, 130 after an interrupt. Whole shards stay in any case, and `--resume` goes on from them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..checks import check, check_name, integer, refusal, shown
from ..errors import ConfigError, InvalidRequestError
from .files.jobs import parsed_record, read_id
from .files.lines import IdTable, LineSource, decoded_line
from .flags import FlagParser, add_engine_flags, check_positive, engine_config, parse_flags
from .process import EXIT_SOME_FAILED, interrupts_held, run_command
from .progress import ProgressReport, say

LINE_KEYS = ("prompt", "prompt_token_ids", "id")
"""Keys that a line of a .jsonl file may have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jpaged distill` with the arguments `argv`, by default the process's own; return its exit status."""
    return run_command(_run, sys.argv[1:] if argv is None else argv)


def distill_parser() -> FlagParser:
    """Return the parser of `jpaged distill`; engine options that were not given are no attributes of its result."""
    parser = FlagParser(
        prog="jpaged distill",
        description="Write a model's most likely tokens at each place of many sequences to a directory, from which "
        "jpaged.research.read_distilled reads them.",
        allow_abbrev=False,
    )
    help = ".txt: a text per line; .jsonl, - or a pipe: an object per line, with prompt or prompt_token_ids, and id"
    parser.add_argument("--prompt-file", metavar="F", required=True, help=help)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="the directory")
    parser.add_argument("--resume", action="store_true", help="go on with what is missing from the directory")
    help = "most likely tokens at each place; --max-logprobs is as high where it is not given"
    parser.add_argument("--top-k", metavar="K", type=int, required=True, help=help)
    help = "temperature of the logprobs; default: 1"
    parser.add_argument("--temperature", metavar="X", type=float, default=1.0, help=help)
    help = "float32, bfloat16 or float16; default: float32"
    parser.add_argument("--logprobs-dtype", metavar="NAME", default="float32", help=help)
    parser.add_argument("--shard-tokens", metavar="N", type=int, help="tokens of a file at most; default: 65536")
    add_engine_flags(parser.add_argument_group("engine"))
    return parser


def _run(argv: list[str]) -> int:
    """Run the command; return 0, or EXIT_SOME_FAILED if some lines were wrong.

    Flags, the directory and the files of the model are checked, and the first line is read, before weights are loaded.
    Raises ConfigError or InvalidRequestError if the run cannot start.
    """
    args = parse_flags(distill_parser(), argv)
    check_positive(args, "top_k", "shard_tokens")
    config = engine_config(args)
    if "max_logprobs" not in args:
        config = replace(config, max_logprobs=max(config.max_logprobs, args.top_k))
    with interrupts_held():  # This imports JAX, which would crash if an interrupt came during the import.
        from ..engine import Engine
        from ..research.distillation import SHARD_TOKENS, check_settings, distill, make_settings
        from ..research.distilled import read_index
        from ..startup.open_model import open_model

    directory = Path(args.output).expanduser()
    if directory.exists() and not directory.is_dir():
        raise refusal("--output", f"{directory}, which is a file", "a directory", error=ConfigError)
    options: dict[str, Any] = {"temperature": args.temperature, "logprobs_dtype": args.logprobs_dtype}
    with closing(LineSource(args.prompt_file)) as lines:
        handle = open_model(config)
        check("--top-k", args.top_k, integer(1, handle.spec.vocab_size), error=ConfigError)
        settings = make_settings(config, handle, None, weights_version=0, top_k=args.top_k, **options)
        index = read_index(directory)
        if index is not None and index.shards and not args.resume:
            got = f"{directory}, which has results"
            raise refusal("--output", got, "a new directory", "add --resume to go on with them", error=ConfigError)
        if index is not None:
            check_settings(directory, index, settings)
        numbered = (line for line in lines if line is not None)
        first = next(numbered, None)
        if first is None:
            raise ConfigError(f"--prompt-file: {args.prompt_file} holds no prompt; give at least one line")
        with (
            closing(ProgressReport()) as progress,
            Engine.from_engine_args(config, handle, progress=progress) as engine,
        ):
            reader = _Reader(engine.scorer.encode, lines.format == "jsonl", progress)
            start = time.monotonic()
            prompts = reader.prompts(chain([first], numbered))
            shard_tokens = SHARD_TOKENS if args.shard_tokens is None else args.shard_tokens
            counts = distill(engine, prompts, directory, top_k=args.top_k, shard_tokens=shard_tokens, **options)
            elapsed_s = time.monotonic() - start
        if args.resume:
            say(f"resume: {counts.num_kept} of {reader.num_lines} are there already")
        say(f"distilled: {counts.num_sequences} sequences, {counts.num_tokens} tokens in {elapsed_s:.1f} s")
    return EXIT_SOME_FAILED if reader.num_failed else 0


@dataclass
class _Reader:
    """Makes prompts for `distill` of lines, and counts them."""

    encode: Callable[[Any], list[int]]
    """Returns the checked token ids of a prompt."""
    is_json: bool
    progress: ProgressReport
    num_lines: int = 0
    num_failed: int = 0
    _ids: IdTable = field(default_factory=IdTable)

    def prompts(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
        """Yield id and token ids of each line; one that is wrong is named on stderr and left out."""
        for number, line in lines:
            self.num_lines += 1
            self.progress("sequences", self.num_lines, None)
            try:
                yield self._prompt(number, line)
            except InvalidRequestError as error:
                self.num_failed += 1
                say(f"error: line {number}: {error}")

    def _prompt(self, number: int, line: bytes) -> dict[str, Any]:
        """Return the prompt of a line; its id is that of its object, or its number."""
        record: dict[str, Any] = {"prompt": decoded_line(line)}
        if self.is_json:
            record = parsed_record(record["prompt"])
        for key in record:
            check_name(key, LINE_KEYS, "key of a line")
        id_ = read_id(record, number)
        if (first := self._ids.set_default(id_, number)) != number:
            raise refusal("id", f"{shown(id_)}, which line {first} has too", "an id of its own for each line")
        prompt = {key: value for key, value in record.items() if key != "id"}
        return {"id": id_, "prompt_token_ids": self.encode(prompt)}
