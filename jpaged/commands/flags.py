"""Command-line flags: engine flags come from `EngineConfig`, sampling flags from `SamplingParams`.

Knows flags and their spelling; imports neither JAX nor a model, so that `--help` answers at once. Every
mistake is a ConfigError in one line.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn

from .config import ALIASES, EngineConfig
from .config import NOT_BUILT as UNBUILT_ENGINE
from .errors import ConfigError
from .sampling_params import NOT_BUILT as UNBUILT_SAMPLING

SAMPLING_FLAGS: dict[str, tuple[str, str]] = {
    "max_tokens": ("int", "tokens to generate; default: to the end of the reply or of the context"),
    "temperature": ("float", "0 is greedy; default: the model's"),
    "top_p": ("float", "keep the most likely tokens up to this probability, in (0, 1]"),
    "top_k": ("int", "keep this many of the most likely tokens; 0 is off"),
    "min_p": ("float", "keep tokens at least this likely relative to the likeliest"),
    "seed": ("int", "fix the random draws of every request"),
    "n": ("int", "samples per prompt, 1 to 128; on stdout each begins with [its number]"),
    "presence_penalty": ("float", "lower the logits of tokens that were generated already, by -2 to 2"),
    "frequency_penalty": ("float", "the same each time that they were generated"),
    "repetition_penalty": ("float", "divide the logits of tokens of prompt and output by this; 1 is off"),
    "min_tokens": ("int", "nothing ends the output before it has so many tokens"),
    "logprobs": ("int", "also give the logprobs of the sampled and of this many likeliest tokens; -1: of all"),
    "prompt_logprobs": ("int", "the same for the prompt's tokens"),
}
FLAG_NAMES = {"n": "num_samples"}
UNBUILT_FLAGS = {
    *UNBUILT_ENGINE, *UNBUILT_SAMPLING, "json_schema", "regex", "grammar", "choice",
    "lora", "image", "trace",
}  # fmt: skip


class FlagParser(argparse.ArgumentParser):
    """Raises instead of printing usage and leaving with status 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def generate_parser() -> argparse.ArgumentParser:
    """Flags of `jpaged generate`. Flags that were not given are None (or absent, for engine options)."""
    parser = FlagParser(
        prog="jpaged generate",
        description="Complete prompts. Text goes to stdout; progress and the closing summary go to stderr.",
        allow_abbrev=False,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt; - reads one from stdin")
    parser.add_argument("-p", "--prompt", action="append", default=[], help="a prompt (repeatable)")
    parser.add_argument("--prompt-file", metavar="F", help=".txt: a prompt per line; .jsonl: an object per line")
    parser.add_argument("-o", "--output", metavar="F", help="write JSON lines here, one per request, in input order")
    parser.add_argument("--resume", action="store_true", help="go on with what is missing from the output file")
    parser.add_argument("--json", action="store_true", help="write the JSON lines to stdout")
    chat = parser.add_argument_group("chat")
    chat.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="write text prompts out by the chat template; default: if the model has one",
    )
    chat.add_argument("--system", metavar="TEXT", help="system message before each text prompt")
    chat.add_argument("--chat-template", metavar="F", help="a Jinja template to use instead of the model's")
    _add_sampling_flags(parser.add_argument_group("sampling"))
    add_engine_flags(parser.add_argument_group("engine"))
    return parser


def parse_generate(argv: list[str]) -> argparse.Namespace:
    """Parse the flags of `generate`. ConfigError for unknown flags, naming the nearest, and for unbuilt ones."""
    parser = generate_parser()
    known = sorted(option for action in parser._actions for option in action.option_strings)
    for index, word in enumerate(argv):
        if word == "--":
            break
        flag, _, value = word.partition("=")
        if not flag.startswith("--") or flag in known:
            continue
        given = value or (argv[index + 1] if index + 1 < len(argv) else "")
        _refuse_flag(flag, given, known)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse_flag(unknown[0], "", known)
    return args


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine options among parsed flags, checked."""
    names = {field.name for field in fields(EngineConfig)} - {"seed"}
    return EngineConfig(**{name: value for name, value in vars(args).items() if name in names})


def sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given as flags."""
    names = [*SAMPLING_FLAGS, "stop", "stop_token_ids", "ignore_eos", "allowed_token_ids", "bad_words"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.logit_bias is None:
        return given
    biases = dict(args.logit_bias)
    if len(biases) < len(args.logit_bias):
        raise ConfigError("--logit-bias: got a token id twice, allowed: each once; leave one of them out")
    return {**given, "logit_bias": biases}


def beam_flags(args: argparse.Namespace) -> dict[str, Any] | None:
    """The parameters of beam search among the flags, if it is asked for. ConfigError for flags without use then."""
    sampling = sampling_flags(args)
    if args.beam_width is None:
        if args.length_penalty is not None:
            raise ConfigError("--length-penalty: has no effect without --beam-width; add that or leave it out")
        return None
    others = [name for name in sampling if name not in ("max_tokens", "ignore_eos")]
    if others:
        flag = "--" + FLAG_NAMES.get(others[0], others[0]).replace("_", "-")
        raise ConfigError(f"{flag}: has no effect with --beam-width, which samples nothing; leave one of them out")
    given = {"beam_width": args.beam_width, "length_penalty": args.length_penalty, **sampling}
    return {name: value for name, value in given.items() if value is not None}


def _add_sampling_flags(group: argparse._ArgumentGroup) -> None:
    for name, (kind, text) in SAMPLING_FLAGS.items():
        flag = "--" + FLAG_NAMES.get(name, name).replace("_", "-")
        spellings = ["-n", flag] if name == "max_tokens" else [flag]
        group.add_argument(*spellings, dest=name, type=_number(kind), metavar="N" if kind == "int" else "X", help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument(
        "--stop-token-ids", action="append", type=_number("int"), metavar="ID", help="end at this token id (repeatable)"
    )
    group.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=X", help="add X to a token's logit (repeatable)"
    )
    group.add_argument(
        "--allowed-token-ids",
        action="append",
        type=_number("int"),
        metavar="ID",
        help="generate these tokens only (repeatable)",
    )
    group.add_argument("--bad-words", action="append", metavar="TEXT", help="never generate this (repeatable)")
    group.add_argument("--beam-width", type=_number("int"), metavar="N", help="beam search: the N best, best first")
    group.add_argument(
        "--length-penalty",
        type=_number("float"),
        metavar="X",
        help="of beam search: beams are compared by their logprob / length ** X; default 1",
    )
    group.add_argument("--ignore-eos", action="store_const", const=True, help="go on past the end-of-sequence token")


def add_engine_flags(group: argparse._ArgumentGroup) -> None:
    """Flags of every engine option but `seed`; those that were not given are absent."""
    aliases = {name: alias for alias, name in ALIASES.items()}
    for field in fields(EngineConfig):
        if field.name in ("seed", "logits_processors"):
            continue  # --seed is the sampling parameter; functions have no spelling on a command line.
        spellings = ["--" + name.replace("_", "-") for name in (field.name, aliases.get(field.name)) if name]
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": field.metadata["help"]}
        kind = str(field.type).split(" ")[0]
        if field.name == "num_decode_steps":
            options |= {"type": _steps, "metavar": "N|auto"}
        elif kind == "bool":
            options["action"] = argparse.BooleanOptionalAction
        elif field.name == "limits":
            options |= {"type": _limits, "metavar": "NAME=N,NAME=N"}
        elif kind in ("int", "float"):
            options |= {"type": _number(kind), "metavar": "N" if kind == "int" else "X"}
        else:
            options["metavar"] = "NAME" if field.name != "compilation_cache_dir" else "DIR"
        group.add_argument(*(["-m"] if field.name == "model" else []), *spellings, **options)


def _number(kind: str) -> Callable[[str], float]:
    """A converter whose complaint names what it got and what it takes."""

    def convert(text: str) -> float:
        try:
            return int(text) if kind == "int" else float(text)
        except ValueError:
            wanted = "an integer" if kind == "int" else "a number"
            raise argparse.ArgumentTypeError(f"got {text!r}, allowed: {wanted}") from None

    return convert


def _bias(text: str) -> tuple[float, float]:
    token_id, equals, bias = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a token id and a number, such as 1234=-100")
    return _number("int")(token_id), _number("float")(bias)


def _steps(text: str) -> float | str:
    return text if text == "auto" else _number("int")(text)


def _limits(text: str) -> dict[str, float]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, allowed: pairs such as waiting_requests=1000,waiting_tokens=200000"
        )
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: each name once")
    return {name.strip(): _number("int")(number) for name, _, number in pairs}


def _refuse_flag(flag: str, value: str, known: list[str]) -> NoReturn:
    name = flag.lstrip("-").replace("-", "_")
    if name in UNBUILT_FLAGS or name.removeprefix("no_") in UNBUILT_FLAGS:
        given = f" (got {value!r})" if value else ""
        raise ConfigError(f"{flag}: not available in this version{given}; allowed: leave it out")
    near = [option for option in known if option.startswith(flag)] or difflib.get_close_matches(flag, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "see jpaged generate --help"
    raise ConfigError(f"{flag}: unknown flag; {hint}")
