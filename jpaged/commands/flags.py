"""Command-line flags: engine flags come from `EngineConfig`, sampling flags from the table in `SamplingParams`.

Knows flags and how they are written; imports neither JAX nor a model, so that `--help` answers at once. Every
mistake is a ConfigError in one line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from .. import not_available
from ..checks import check, check_name, integer, or_none, refusal, sent_as, shown
from ..config.engine_config import ALIASES, PYTHON_ONLY, EngineConfig
from ..errors import ConfigError
from ..sampling.parameter import Flag
from ..sampling.sampling_params import FIELDS, BeamSearchParams, SamplingParams
from ..structured_outputs import structured_outputs


def _flags_of(params: type[SamplingParams | BeamSearchParams]) -> dict[str, Flag]:
    """Return the flag of each field that has one, by the field's name."""
    return {one.name: one.metadata["flag"] for one in fields(params) if one.metadata["flag"] is not None}


SAMPLING_FLAGS, BEAM_FLAGS = _flags_of(SamplingParams), _flags_of(BeamSearchParams)
SAMPLING_DEFAULTS = {name: getattr(SamplingParams(max_tokens=None), name) for name in FIELDS}
"""The value of each sampling parameter that no flag, model or line gives: outputs have no limit but the context."""
STRUCTURE_FLAGS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""Flags of structured output, and keys of a line of a file → the field of StructuredOutputsParams that each sets."""
FLAG_NAMES = {
    "n": "--num-samples",
    **{f"structured_outputs.{field}": f"--{flag.replace('_', '-')}" for flag, field in STRUCTURE_FLAGS.items()},
}
"""Fields of SamplingParams → flags with other names, as errors call them."""
FIRST_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n")
"""Sampling parameters that --help shows first, because most users want them."""


class _Once(argparse.Action):
    """Stores a value, and refuses a second one, which would hide the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, f"got {shown(values)} too, allowed: one; run the command for each")
        setattr(namespace, self.dest, values)


class FlagParser(argparse.ArgumentParser):
    """A parser that raises ConfigError where argparse would print its usage and exit with status 2."""

    def error(self, message: str) -> NoReturn:
        """Raise the parser's complaint, which begins with the flag."""
        raise ConfigError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def generate_parser() -> FlagParser:
    """Return the parser of `jpaged generate`.

    In the parsed arguments, a flag that was not given is None, or False for the switches `--resume` and `--json`, or an
    empty list for prompts. An engine option that was not given is no attribute at all, so that EngineConfig supplies
    its default. A flag cannot be shortened to its first letters (`allow_abbrev`), and `--prompt-file` (`_Once`) cannot
    be given twice.
    """
    parser = FlagParser(
        prog="jpaged generate",
        description="Complete prompts. Text goes to stdout; progress and the closing summary go to stderr.",
        allow_abbrev=False,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; - reads one from stdin")
    parser.add_argument("-p", "--prompt", action="append", default=[], help="a prompt (repeatable)")
    help = ".txt: a prompt per line; .jsonl: an object per line; - or a pipe: an object per line"
    parser.add_argument("--prompt-file", metavar="F", action=_Once, help=help)
    parser.add_argument("-o", "--output", metavar="F", help="write JSON lines here, one per request, in input order")
    parser.add_argument("--resume", action="store_true", help="go on with what is missing from the output file")
    parser.add_argument("--json", action="store_true", help="write the JSON lines to stdout")
    chat = parser.add_argument_group("chat")
    help = "write text prompts out by the chat template; default: if the model has one"
    chat.add_argument("--chat", action=argparse.BooleanOptionalAction, help=help)
    chat.add_argument("--system", metavar="TEXT", help="system message before each text prompt")
    chat.add_argument("--chat-template", metavar="F", help="a Jinja template to use instead of the model's")
    add_sampling_flags(parser.add_argument_group("sampling"))
    structure = parser.add_argument_group("structured output", "the whole output is one of these; give at most one")
    help = "JSON that this schema allows (draft 2020-12): a file, or the schema itself"
    structure.add_argument("--json-schema", metavar="F", action=_Once, help=help)
    structure.add_argument("--regex", metavar="REGEX", action=_Once, help="a text that this expression matches")
    help = "one of these texts (repeatable)"
    structure.add_argument("--choice", metavar="TEXT", action="append", help=help)
    help = "a text of this grammar, Lark or GBNF: a file, or the grammar itself"
    structure.add_argument("--grammar", metavar="F", action=_Once, help=help)
    add_engine_flags(parser.add_argument_group("engine"))
    cluster = parser.add_argument_group("cluster", "run on Ray; --data-parallel-size is the number of workers then")
    help = "auto (the cluster of RAY_ADDRESS or of this machine), local (one for this run) or HOST:PORT"
    cluster.add_argument("--ray", metavar="ADDRESS", action=_Once, help=help)
    help = 'what Ray reserves for a worker, such as {"GPU": 1}; default: the devices of one engine, else a whole node'
    cluster.add_argument("--ray-resources", metavar="JSON", type=_json_object, action=_Once, help=help)
    return parser


def parse_generate(argv: list[str]) -> argparse.Namespace:
    """Return the parsed flags of `jpaged generate`; see `parse_flags`."""
    return parse_flags(generate_parser(), argv)


def parse_flags(
    parser: FlagParser, argv: list[str], missing: Collection[str] = not_available.FLAGS
) -> argparse.Namespace:
    """Return the parsed flags of a command. `missing` are flags that this version does not have, as option names.

    Flag names are checked before argparse sees them, so that its less helpful errors do not come first. Raises
    ConfigError if a flag is unknown (the message names the most similar flag) or not available in this version, and
    whenever argparse refuses an argument. `--help` prints the help and ends the process, as argparse does.
    """
    known = sorted(option for action in parser._actions for option in action.option_strings)
    for index, word in enumerate(argv):
        if word == "--":  # What follows are prompts.
            break
        flag, _, value = word.partition("=")
        if flag.startswith("--"):
            # The value is only shown in the error: the text after "=", or the next word.
            _check_flag(flag, value or "".join(argv[index + 1 : index + 2]), known, parser.prog, missing)
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # An unknown short flag, such as -x.
        _check_flag(unknown[0], "", known, parser.prog, missing)
    return args


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine options among the parsed flags, checked. `--seed` is a sampling parameter and left out."""
    names = {field.name for field in fields(EngineConfig)} - {"seed"}
    return EngineConfig(**{name: value for name, value in vars(args).items() if name in names})


def sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given as flags, by name; values are not checked yet.

    `--logit-bias ID=X` is repeatable: its pairs become one dict. Raises ConfigError if they name a token id twice.
    """
    given = _given(args, SAMPLING_FLAGS)
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
        if len(given["logit_bias"]) < len(args.logit_bias):
            raise refusal("--logit-bias", "a token id twice", "each once", "leave one of them out", error=ConfigError)
    if wanted := {STRUCTURE_FLAGS[flag]: value for flag, value in _given(args, STRUCTURE_FLAGS).items()}:
        for kind, flag, start in ("json", "--json-schema", "{"), ("grammar", "--grammar", ""):
            if kind in wanted:
                wanted[kind] = _text_or_file(flag, wanted[kind], start)
        first = next(iter(wanted))
        with sent_as(FLAG_NAMES | {"structured_outputs": FLAG_NAMES[f"structured_outputs.{first}"]}):
            given["structured_outputs"] = structured_outputs(wanted)
    return given


def _text_or_file(flag: str, value: str, start: str) -> str:
    """Return the text of the file `value`, or `value` itself if it is no path but a text.

    A JSON schema is a text if it begins with `start`, and a grammar if it has a colon, or = as GBNF has. Raises
    ConfigError for a file that cannot be read or is no UTF-8.
    """
    try:
        is_text = value.lstrip().startswith(start) if start else ":" in value and not Path(value).is_file()
    except (OSError, ValueError):  # A name longer than a file's may be, or with a zero byte.
        is_text = True
    if is_text:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise refusal(flag, f"{shown(value)} ({reason})", "a file, or the text itself", error=ConfigError) from error


def beam_flags(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the beam search parameters that were given as flags, or None without `--beam-width`.

    `--max-tokens` and `--ignore-eos` belong to beam search too. Raises ConfigError if a flag would have no effect:
    `--length-penalty` without `--beam-width`, or any other sampling flag with it.
    """
    sampling = sampling_flags(args)
    if args.beam_width is None:
        if args.length_penalty is not None:
            raise ConfigError("--length-penalty: has no effect without --beam-width; add that or leave it out")
        return None
    # Sampling parameters that a beam search does not have.
    others = [name for name in sampling if name not in ("max_tokens", "ignore_eos")]
    if others:
        structures = ["--" + flag.replace("_", "-") for flag in STRUCTURE_FLAGS if getattr(args, flag) is not None]
        flag = structures[0] if structures else _spellings(others[0], SAMPLING_FLAGS[others[0]])[-1]
        raise ConfigError(f"{flag}: has no effect with --beam-width, which samples nothing; leave one of them out")
    return {**_given(args, BEAM_FLAGS), **sampling}


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError if one of the flags `names` was given an integer below 1. Flags that were not given pass."""
    for name in names:
        check("--" + name.replace("_", "-"), getattr(args, name), or_none(integer(1)), error=ConfigError)


def _given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those arguments that are not None, by name. A command need not have all of them."""
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def _spellings(name: str, flag: Flag) -> tuple[str, ...]:
    """Return the flag's own spellings, else the parameter's name with dashes: `top_p` is `--top-p`."""
    return flag.names or ("--" + name.replace("_", "-"),)


def _help_of(name: str, flag: Flag) -> str:
    """Return the help of the parameter `name`, with what only a command line has: repetition and other defaults."""
    params = SamplingParams if name in SAMPLING_FLAGS else BeamSearchParams
    text: str = params.__dataclass_fields__[name].metadata["help"]
    text += f"; default: {flag.default}" if flag.default else ""
    return f"{text} (repeatable)" if flag.metavar in REPEATABLE else text


def add_sampling_flags(group: argparse._ArgumentGroup, *, without: Collection[str] = ()) -> None:
    """Add the flags of all sampling and beam search parameters, but for those in `without`, to an argparse group.

    The metavar of a flag says what it takes, such as "N" for an integer; a switch has none, and stores True. The order
    is that of `--help`: numbers with `FIRST_FLAGS` before the others, repeatable flags, numbers of beam search, and
    switches. Flags that are not given parse to None.
    """
    # A dict keeps the place of a key that it has already, so FIRST_FLAGS stay in front.
    sampling = {name: SAMPLING_FLAGS[name] for name in FIRST_FLAGS} | SAMPLING_FLAGS
    for metavars, flags in (NUMBERS, sampling), (REPEATABLE, sampling), (NUMBERS, BEAM_FLAGS), (("",), sampling):
        for name, flag in flags.items():
            if flag.metavar not in metavars or name in without:
                continue
            options: dict[str, Any] = {"action": "store_const", "const": True}
            if flag.metavar:
                action = "append" if flag.metavar in REPEATABLE else "store"
                options = {"action": action, "type": CONVERTERS[flag.metavar], "metavar": flag.metavar}
            group.add_argument(*_spellings(name, flag), dest=name, help=_help_of(name, flag), **options)


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    """Add a flag for each field of EngineConfig except `seed` and the Python-only ones; aliases become spellings too.

    The field's type decides what the flag takes: `bool` gives `--name` and `--no-name`; other types take a value, read
    by the converter that `FLAG_TYPES` has for the field, else for its type, else as plain text. An option that is not
    given is no attribute of the parsed arguments.
    """
    aliases = {name: alias for alias, name in ALIASES.items()}
    for field in fields(EngineConfig):
        if field.name in ("seed", *PYTHON_ONLY):
            continue  # --seed is the sampling parameter; functions and arrays have no spelling on a command line.
        spellings = ["--" + name.replace("_", "-") for name in (field.name, aliases.get(field.name)) if name]
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": field.metadata["help"]}
        type_name = str(field.type).split(" ")[0]  # "int" of "int | None": annotations are strings.
        if type_name == "bool":
            options["action"] = argparse.BooleanOptionalAction
        else:
            converter, metavar = FLAG_TYPES.get(field.name) or FLAG_TYPES.get(type_name) or (str, "NAME")
            options |= {"type": converter, "metavar": metavar}
        group.add_argument(*(["-m"] if field.name == "model" else []), *spellings, **options)


def _converter(number_type: type[int | float], allowed: str) -> Callable[[str], Any]:
    """Return a function that converts a flag's text to `number_type`, for argparse.

    For other text it raises argparse.ArgumentTypeError, whose message says that `allowed` is allowed.
    """

    def convert(text: str) -> int | float:
        """Return the number that `text` stands for."""
        try:
            return number_type(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, allowed: {allowed}") from None

    return convert


_integer, _number = _converter(int, "an integer"), _converter(float, "a number")


def _bias(text: str) -> tuple[int, float]:
    """Return token id and bias of a text such as "1234=-100"."""
    token_id, equals, bias = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a token id and a number, such as 1234=-100")
    return _integer(token_id), _number(bias)


def _steps(text: str) -> int | str:
    """Return "auto" as it is, and any other text as an integer."""
    return text if text == "auto" else _integer(text)


def _limits(text: str) -> dict[str, int]:
    """Return the numbers of a text such as "waiting_requests=1000,waiting_tokens=200000" by their names.

    They are limits of the engine, whose names EngineConfig checks. Spaces around names and numbers do not count. Raises
    argparse.ArgumentTypeError if the text has another form or a name twice.
    """
    parts = (pair.partition("=") for pair in text.split(","))
    pairs = [(name.strip(), equals, number) for name, equals, number in parts]
    if not all(name and equals for name, equals, _ in pairs):
        example = "waiting_requests=1000,waiting_tokens=200000"
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: pairs such as {example}")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: each name once")
    return {name: _integer(number) for name, _, number in pairs}


def _json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a text holds; raises argparse.ArgumentTypeError for any other text.

    The error for text that is no JSON is the same as for JSON that is no object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets.
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'got {shown(text)}, allowed: a JSON object such as {{"NAME": 1}}')
    return value


FLAG_TYPES: dict[str, tuple[Callable[[str], Any], str]] = {
    "num_decode_steps": (_steps, "N|auto"),
    "limits": (_limits, "NAME=N,NAME=N"),
    "compilation_cache_dir": (str, "DIR"),
    "weights_cache_dir": (str, "DIR"),
    "hf_overrides": (_json_object, "JSON"),
    "int": (_integer, "N"),
    "float": (_number, "X"),
}
"""Engine option, or the type of its field → converter of the flag's text, and metavar."""
NUMBERS, REPEATABLE = ("N", "X"), ("TEXT", "ID", "ID=X")
CONVERTERS: dict[str, Callable[[str], Any]] = {"N": _integer, "X": _number, "TEXT": str, "ID": _integer, "ID=X": _bias}
"""Metavar of a flag → the function that converts the flag's text."""


def _check_flag(flag: str, value: str, known: list[str], prog: str, missing_names: Collection[str]) -> None:
    """Raise ConfigError if a flag is not in `known`, those of the command `prog`.

    The message says that the flag, one of `missing_names`, is not available in this version, with its `value` unless
    empty, or names the most similar known flag.
    """
    # `--no-NAME` is as unavailable as `--NAME`.
    is_missing = flag.lstrip("-").replace("-", "_").removeprefix("no_") in missing_names
    missing, way_out = [flag] if is_missing else [], f"leave it out, or see {prog} --help"
    check_name(flag, known, "flag", not_available=missing, value=value or None, way_out=way_out, error=ConfigError)
