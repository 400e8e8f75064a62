"""The requests of one `generate`: prompts from the command line, stdin or a file, each with its parameters.

A bad prompt on the command line ends the start; a bad line of a file becomes that line's error.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import not_available
from ..checks import check_name, refusal, shown
from ..errors import ConfigError, InvalidRequestError
from ..sampling.sampling_params import FIELDS, BeamSearchParams, SamplingParams
from ..text.prompts import PROMPT_EXTRAS, PROMPT_KEYS, EncodedPrompt, PromptEncoder, check_priority
from .flags import BEAM_FLAGS

LINE_KEYS = (*PROMPT_KEYS, *PROMPT_EXTRAS, "id")
"""Keys of a line of a .jsonl file beside sampling parameters."""
BEAM_LINE_FIELDS = ("max_tokens", "ignore_eos")
"""Parameters of a line that a beam search has too; its others are the same for all lines, given by flags."""
MAX_ERROR_CHARS = 4096


@dataclass(frozen=True)
class Job:
    """One request of a run. `number` goes into the seed of a request without one: in a file, the line's number."""

    id: str | int
    number: int
    prompt: EncodedPrompt
    params: SamplingParams | BeamSearchParams


@dataclass(frozen=True)
class BadLine:
    """A line of a file that cannot become a request, and why."""

    id: str | int
    number: int
    error: InvalidRequestError


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts among the arguments, or none where a file has them.

    Without either, the text on stdin is the prompt, if stdin is a pipe or a file: a terminal or a service's stdin
    might never end.
    """
    prompts = [*args.prompts, *args.prompt]
    if args.prompt_file is not None:
        if prompts:
            raise ConfigError("prompt: got prompts and --prompt-file, allowed: one of the two; leave one of them out")
        return []
    if prompts.count("-") > 1:
        raise refusal("prompt", "- twice", "once, since stdin is read to its end", error=ConfigError)
    if "-" in prompts and sys.stdin is None:
        raise ConfigError("prompt: got -, and stdin is closed; give the prompt as an argument")
    if not prompts and _is_stdin_redirected() and (text := _read_stdin()):
        return [text]
    if not prompts:
        allowed = "a prompt as an argument, --prompt-file F, or text on stdin"
        way_out = 'try jpaged generate "What is the capital of France?"'
        raise refusal("prompt", "none", allowed, way_out, error=ConfigError)
    return [_read_stdin() if prompt == "-" else prompt for prompt in prompts]


def _is_stdin_redirected() -> bool:
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # stdin is closed, or is an object without a descriptor.
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read_stdin() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt: stdin is not {error.encoding} ({error.reason}); give text") from error


@dataclass(frozen=True)
class JobReader:
    """Turns prompts into jobs: applies the chat template and the defaults, and checks them."""

    encoder: PromptEncoder
    defaults: Mapping[str, Any]
    """Sampling parameters from the flags and from the model."""
    max_logprobs: int
    max_num_seqs: int | None
    """Samples of one prompt at most; None while the engine can still be started for as many as are asked for."""
    scheduling_policy: object
    use_chat: bool
    """Whether text prompts become chat messages."""
    beams: Mapping[str, Any] | None = None
    """Parameters of beam search from the flags; where they are given, nothing is sampled."""
    system: str | None = None
    """System message put before text prompts."""

    def job(self, id_: str | int, number: int, prompt: Any, own_params: Mapping[str, Any]) -> Job:
        """Return a checked job; InvalidRequestError names what is wrong."""
        if "output_kind" in own_params:
            reason = "has no effect on a line, whose output is written when it ends"
            raise InvalidRequestError(f"output_kind: {reason}; leave it out", param="output_kind")
        params = self._params(own_params)
        self.encoder.check_params(params, max_logprobs=self.max_logprobs, max_num_seqs=self.max_num_seqs)
        encoded = self.encoder.encode(self._as_chat(prompt))
        check_priority(encoded.priority, self.scheduling_policy)
        return Job(id_, number, encoded, params)

    def _params(self, own_params: Mapping[str, Any]) -> SamplingParams | BeamSearchParams:
        if self.beams is None:
            return SamplingParams(**{"max_tokens": None, **self.defaults, **own_params})
        for name in own_params:
            if name not in BEAM_LINE_FIELDS:
                check_name(name, FIELDS, "parameter", not_available=not_available.SAMPLING_PARAMETERS)
                allowed = f"allowed: {', '.join(BEAM_LINE_FIELDS)}; leave it out, or leave --beam-width out"
                raise InvalidRequestError(f"{name}: has no effect in a beam search, {allowed}", param=name)
        return BeamSearchParams(**{"max_tokens": None, **self.beams, **own_params})

    def file_jobs(self, path: Path) -> list[Job | BadLine]:
        """Return the jobs of a .txt or .jsonl file in its order, without blank lines. Line numbers begin at 1."""
        if path.suffix not in (".txt", ".jsonl"):
            raise refusal("--prompt-file", shown(path.name), "a name ending in .txt or .jsonl", error=ConfigError)
        jobs: list[Job | BadLine] = []
        line_of_id: dict[str, int] = {}
        for number, line in _lines(path):
            id_: str | int = number
            try:
                own_params: dict[str, Any] = {}
                prompt: Any = _text(line)
                if path.suffix == ".jsonl":
                    record = _record(prompt)
                    id_ = _id(record, number)
                    _check_keys(record)
                    prompt = {key: record[key] for key in (*PROMPT_KEYS, *PROMPT_EXTRAS) if key in record}
                    own_params = {key: value for key, value in record.items() if key not in LINE_KEYS}
                if (first := line_of_id.setdefault(repr(id_), number)) != number:
                    raise refusal("id", f"{shown(id_)}, which line {first} has too", "an id of its own for each line")
                jobs.append(self.job(id_, number, prompt, own_params))
            except InvalidRequestError as error:
                jobs.append(BadLine(id_, number, error))
        if not jobs:
            raise ConfigError(f"--prompt-file: {path} holds no prompt; give at least one line")
        return jobs

    def _as_chat(self, prompt: Any) -> Any:
        """Return a text prompt as chat messages, if that is wanted; any other prompt as it is."""
        extras = {key: prompt[key] for key in PROMPT_EXTRAS if key in prompt} if isinstance(prompt, Mapping) else {}
        text = prompt.get("prompt") if isinstance(prompt, Mapping) and {*prompt} - {*extras} == {"prompt"} else prompt
        if not self.use_chat or not isinstance(text, str):
            if self.system is not None:
                raise refusal("prompt", "messages or token ids", "a text with --system", "leave --system out")
            return prompt
        if not text:
            raise refusal("prompt", "''", "a text that is not empty", "give some text")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {"messages": [*system, {"role": "user", "content": text}], **extras}


def error_record(id_: str | int, error: InvalidRequestError | str) -> dict[str, Any]:
    """Return the output line of a request that was refused, or that the engine failed with the message `error`."""
    kind, param = ("EngineError", None) if isinstance(error, str) else (type(error).__name__, error.param)
    return {"id": id_, "error": {"type": kind, "message": str(error)[:MAX_ERROR_CHARS], "param": param}}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each line that is not blank."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"--prompt-file: {path} cannot be read ({error}); give a readable file") from error


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")  # Some editors begin a file with a byte-order mark.
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"line: is not UTF-8 ({error}); save the file as UTF-8") from error


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line, object_pairs_hook=_without_repeats)
    except InvalidRequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"line: is not JSON ({error}); give one JSON object per line") from error
    if not isinstance(record, dict):
        allowed = f"allowed: an object with one of {', '.join(PROMPT_KEYS)}"
        raise InvalidRequestError(f"line: got a JSON {type(record).__name__}, {allowed}")
    if "num_samples" in record:
        if "n" in record:
            raise InvalidRequestError("num_samples: is another name of n, got both; leave one out", param="num_samples")
        record["n"] = record.pop("num_samples")
    return record


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse one that has a key twice."""
    record = dict(pairs)
    if len(record) < len(pairs):
        key = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidRequestError(f"{shown(key)}: stands twice in one object; leave one of them out", param=key[:100])
    return record


def _id(record: dict[str, Any], number: int) -> str | int:
    """Return the line's `id`, or its number where it has none."""
    id_ = record.get("id", number)
    if not isinstance(id_, str | int) or isinstance(id_, bool):
        raise refusal("id", shown(id_), "a string or an integer")
    return id_


def _check_keys(record: dict[str, Any]) -> None:
    """Refuse keys that a line cannot have."""
    for key in record:
        if key in BEAM_FLAGS:
            way_out = f"give --{key.replace('_', '-')} instead"
            raise InvalidRequestError(f"{key}: is the same for all lines of a run; {way_out}", param=key)
        check_name(key, (*FIELDS, *LINE_KEYS), "parameter", not_available=not_available.LINE_KEYS)
