"""The requests of one `generate`: prompts from the command line, stdin or a file, each with its parameters.

A bad prompt on the command line ends the start; a bad line of a file becomes that line's error.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from ... import not_available
from ...checks import check_name, json_integer, refusal, sent_as, told
from ...errors import ConfigError, InvalidRequestError
from ...messages import Params
from ...sampling.sampling_params import FIELDS, INTEGER_FIELDS, BeamSearchParams, RequestOutputKind, SamplingParams
from ...text.prompt_params import CheckedParams
from ...text.prompts import (
    CHAT_OPTIONS,
    PROMPT_EXTRAS,
    PROMPT_KEYS,
    TOOL_OPTIONS,
    EncodedPrompt,
    PromptEncoder,
    check_priority,
)
from ..flags import BEAM_FLAGS, FLAG_NAMES, STRUCTURE_FLAGS
from .lines import LineSource, decoded_line, json_object, line_digest
from .resume import FinishedRecords, LineIds

PROMPT_PARTS = (*PROMPT_KEYS, *PROMPT_EXTRAS, *CHAT_OPTIONS, *TOOL_OPTIONS)
"""Keys of a line that make its prompt."""
LINE_KEYS = (*PROMPT_PARTS, "id")
"""Keys that a line of a .jsonl file may have beside sampling parameters."""
BEAM_LINE_FIELDS = ("max_tokens", "ignore_eos")
"""Parameters that a line may give in a beam search; flags give all others, which are the same for all lines."""
MAX_ERROR_CHARS = 4096


@dataclass(frozen=True)
class Job:
    """One request of a run. `number` is its line's number in a file; requests without a seed get one from it."""

    id: str | int
    number: int
    prompt: EncodedPrompt
    checked: CheckedParams
    digest: int = 0
    """The `line_digest` of its line, by which a resumed run recognizes a line that has not changed."""

    @property
    def params(self) -> Params:
        """Return the sampling or beam search parameters of the request."""
        return self.checked.params


@dataclass(frozen=True)
class BadLine:
    """A line of a file that cannot become a request, and why."""

    id: str | int | None
    """None where the line is no JSON object, or where its `id` is neither a string nor an integer. Its number is not
    used instead, because another line may have that number as its id."""
    number: int
    error: InvalidRequestError


@dataclass(frozen=True)
class DoneLine:
    """A line whose result is in the output file already, from an earlier run."""

    number: int
    entry: int
    """Index of the result in `resume.FinishedRecords`."""


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts given as arguments, `-` replaced by the text on stdin; an empty list with `--prompt-file`.

    Without prompts and file, the text on stdin is the prompt, but only if stdin is a pipe or a regular file: the stdin
    of a terminal or a service might never end. An empty text on stdin is no prompt then. Raises ConfigError if there is
    no prompt, if `-` comes twice, if both prompts and a file are given, or if stdin cannot be read.
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
    """Return whether stdin is a pipe or a regular file."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # stdin is closed, or is an object without a descriptor.
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _read_stdin() -> str:
    """Return the text on stdin without a byte-order mark and its last newline; ConfigError if it cannot be decoded."""
    try:
        return sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")
    except UnicodeError as error:  # For UTF-16 without a byte-order mark, the error has no `reason`.
        reason = getattr(error, "reason", error)
        raise ConfigError(f"prompt: stdin is not {sys.stdin.encoding} ({reason}); give text") from error


@dataclass(frozen=True)
class LineParams:
    """The sampling parameters that a line of a .jsonl file gives itself."""

    params: Mapping[str, Any] = field(default_factory=dict)
    """Their values by the fields of SamplingParams."""
    sent_names: Mapping[str, str] = field(default_factory=dict)
    """Such fields that the line has under other names → these names, as errors call them."""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> LineParams:
        """Return those of a line's object: `num_samples` is `n`, and `json_schema`, `regex`, `choice` and `grammar`
        belong into `structured_outputs`. Raise InvalidRequestError if both names of a parameter are given."""
        params, names = {key: value for key, value in record.items() if key not in LINE_KEYS}, {}
        if "num_samples" in params:
            if "n" in params:
                fault = "num_samples: is another name of n, got both; leave one out"
                raise InvalidRequestError(fault, param="num_samples")
            params["n"], names["n"] = params.pop("num_samples"), "num_samples"
        if keys := [key for key in STRUCTURE_FLAGS if key in params]:
            if "structured_outputs" in params:
                raise refusal("structured_outputs", f"it and {keys[0]}", "one of them", "leave one out")
            names["structured_outputs"] = keys[0]
            names |= {f"structured_outputs.{STRUCTURE_FLAGS[key]}": key for key in keys}
            params["structured_outputs"] = {STRUCTURE_FLAGS[key]: params.pop(key) for key in keys}
        return cls(params, names)


NO_PARAMS = LineParams()


@dataclass(frozen=True)
class JobReader:
    """Turns prompts into jobs: applies the chat template and the defaults, and checks them."""

    encoder: PromptEncoder
    defaults: Mapping[str, Any]
    """Sampling parameters from the flags and from the model."""
    max_logprobs: int
    max_num_seqs: int | None
    """Most samples of one prompt; None if the engine, which is not started yet, can be sized for any number."""
    scheduling_policy: object
    use_chat: bool
    """Whether text prompts are turned into chat messages."""
    beams: Mapping[str, Any] | None = None
    """Parameters of beam search from the flags; None to sample."""
    system: str | None = None
    """System message put before text prompts."""
    finished: FinishedRecords | None = None
    """The results of earlier runs that a resumed run takes over; None without `--resume`."""

    @cached_property
    def default_params(self) -> CheckedParams:
        """Return the parameters of all prompts that have none of their own, as one shared object."""
        with sent_as(FLAG_NAMES):
            return self._checked(self._params({}))

    def job(self, id_: str | int, number: int, prompt: Any, own: LineParams = NO_PARAMS, digest: int = 0) -> Job:
        """Return a job with encoded prompt and checked parameters.

        `id_` and `number` are those of its line. `own` are the parameters that the line gives itself; they take
        precedence over the defaults. `digest` is the line's `line_digest`, by which `--resume` recognizes it. Raises
        InvalidRequestError if the prompt or a parameter is wrong, or if a line gives `output_kind`.
        """
        if "output_kind" in own.params:
            reason = "has no effect on a line, whose output is written when it ends"
            raise InvalidRequestError(f"output_kind: {reason}; leave it out", param="output_kind")
        if own.params:
            of_flags = {name: flag for name, flag in FLAG_NAMES.items() if name.partition(".")[0] not in own.params}
            with sent_as({**of_flags, **own.sent_names}):
                checked = self._checked(self._params(own.params))
        else:
            checked = self.default_params
        chat = self._as_chat(prompt)
        if chat is prompt:
            encoded = self.encoder.encode(prompt)
        else:
            with sent_as({"messages": "prompt"}):
                encoded = replace(self.encoder.encode(chat), name="prompt")
        check_priority(encoded.priority, self.scheduling_policy)
        return Job(id_, number, encoded, checked, digest)

    def argument_jobs(self, prompts: Sequence[str]) -> Iterator[Job | DoneLine]:
        """Yield a job for each prompt of the command line, or a DoneLine if an earlier run has its result.

        The id and the number of a prompt are its index, from 0 on. Raises InvalidRequestError at the first prompt that
        is wrong.
        """
        for number, prompt in enumerate(prompts):
            # An argument that is not UTF-8 has lone surrogates in Python; it is refused below, with a better error.
            digest = line_digest(prompt.encode(errors="surrogatepass"))
            # `take` wants numbers from 1 on, as 0 marks a result that no line has taken.
            entry = None if self.finished is None else self.finished.take(number, digest, number + 1)
            yield self.job(number, number, prompt, digest=digest) if entry is None else DoneLine(number, entry)

    def _checked(self, params: Params) -> CheckedParams:
        """Return parameters that were checked against the model; InvalidRequestError if it cannot take them."""
        return self.encoder.params_checker.check(params, max_logprobs=self.max_logprobs, max_num_seqs=self.max_num_seqs)

    def _params(self, own_params: Mapping[str, Any]) -> Params:
        """Return the defaults with a line's `own_params` in their place, as SamplingParams or BeamSearchParams.

        Without `max_tokens`, only the context length limits the output. Raises InvalidRequestError if a parameter is
        unknown or has a wrong value, or if a line gives one that a beam search does not use.
        """
        if self.beams is None:
            # Nothing but last outputs is taken of a line.
            own_kind = {"max_tokens": None, "output_kind": RequestOutputKind.FINAL_ONLY}
            return SamplingParams(**{**own_kind, **self.defaults, **own_params})
        for name in own_params:
            if name not in BEAM_LINE_FIELDS:
                check_name(name, FIELDS, "parameter")
                allowed = f"allowed: {', '.join(BEAM_LINE_FIELDS)}; leave it out, or leave --beam-width out"
                raise InvalidRequestError(f"{name}: has no effect in a beam search, {allowed}", param=name)
        return BeamSearchParams(**{"max_tokens": None, **self.beams, **own_params})

    def file_jobs(self, lines: LineSource) -> Iterator[Job | BadLine | DoneLine | None]:
        """Yield a Job, BadLine or DoneLine for each line of a .txt or .jsonl file, in order.

        A BadLine says why the line cannot become a job; that includes an id that an earlier line has. A DoneLine is
        yielded, after reading no more of the line than its id, if an earlier run has its result and the line has not
        changed since. None is yielded when a pipe has no line yet. Blank lines yield nothing.
        """
        ids, is_json = LineIds(self.finished), lines.format == "jsonl"
        for numbered in lines:
            if numbered is None:
                yield None
                continue
            number, line = numbered
            digest = line_digest(line)
            if (entry := self._finished_entry(line, number, digest, ids, is_json)) is not None:
                yield DoneLine(number, entry)
                continue
            id_: str | int | None = None if is_json else number  # Until the line's own id has been read.
            try:
                prompt: Any = decoded_line(line)
                record = parsed_record(prompt) if is_json else {}
                id_ = read_id(record, number)
                if is_json:  # The id of a line of text is its number, which is unique.
                    ids.enter(id_, number)
                    _check_keys(record)
                    prompt = {key: record[key] for key in PROMPT_PARTS if key in record}
                yield self.job(id_, number, prompt, LineParams.of(record), digest)
            except InvalidRequestError as error:
                if id_ is None:  # Nothing else would tell the user which line it is.
                    text = str(error).removeprefix("line: ")
                    error = InvalidRequestError(text, param=error.param).within(f"line {number}")
                yield BadLine(id_, number, error)

    def _finished_entry(self, line: bytes, number: int, digest: int, ids: LineIds, is_json: bool) -> int | None:
        """Return `ids.finished_entry` of a line, without parsing more of it than its id; None if that cannot be read.

        The caller then parses the line and reports the error. `number` counts lines from 1 and is the id of a line of
        plain text. `digest` is the `line_digest` of the line.
        """
        if self.finished is None:
            return None
        id_ = _id_of_known_line(line, number) if is_json else number
        return None if id_ is None else ids.finished_entry(id_, digest, number)

    def _as_chat(self, prompt: Any) -> Any:
        """Return a text prompt as chat messages, after the system message if there is one; other prompts unchanged.

        A text is a string or a mapping whose only key, beside `cache_salt` and `priority`, is `prompt`. Those two keys
        are kept. Without `use_chat` nothing changes. Example: "Hi" with the system message "Be brief" gives
        {"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]}. Raises
        InvalidRequestError for an empty text with `use_chat`, or if `--system` is given and the prompt is no text.
        """
        extras = {key: prompt[key] for key in PROMPT_EXTRAS if key in prompt} if isinstance(prompt, Mapping) else {}
        # A mapping with other keys stays a mapping here, and so is no text.
        text = prompt.get("prompt") if isinstance(prompt, Mapping) and {*prompt} - {*extras} == {"prompt"} else prompt
        if not self.use_chat or not isinstance(text, str):
            if self.system is not None:
                raise refusal("prompt", "messages or token ids", "a text with --system", "leave --system out")
            return prompt
        if not text:
            raise refusal("prompt", told(text), "a text that is not empty", "give some text")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {"messages": [*system, {"role": "user", "content": text}], **extras}


def error_record(id_: str | int | None, error: InvalidRequestError | str) -> dict[str, Any]:
    """Return the JSON object that is written for a request without a result.

    `error` is the exception that refused the request, or the message with which the engine ended it; the message is cut
    to MAX_ERROR_CHARS characters. `id_` is None if the line's id could not be read. `param` in the object is the
    parameter at fault, or None, and `code` is that of `JpagedError`.
    """
    kind, param, code = "EngineError", None, None
    if not isinstance(error, str):
        kind, param, code = type(error).__name__, error.param, error.code
    message = str(error)[:MAX_ERROR_CHARS]
    return {"id": id_, "error": {"type": kind, "message": message, "param": param, "code": code}}


class _LineId(msgspec.Struct, gc=False):
    """The only field that is read of a line that an earlier run may have checked."""

    id: str | int | None = None


_LINE_ID_DECODER = msgspec.json.Decoder(_LineId)


def _id_of_known_line(line: bytes, number: int) -> str | int | None:
    """Return the id of a line of JSON, or its number if it has none. The other fields are skipped, which is fast.

    Returns None if the line is no JSON object or its id has a wrong type; the caller then parses it for the error.
    """
    try:
        id_ = _LINE_ID_DECODER.decode(line).id
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:  # Python accepts some lines that msgspec refuses, such as with a byte-order mark or lone surrogates.
            return read_id(parsed_record(decoded_line(line)), number)
        except InvalidRequestError:
            return None
    return number if id_ is None else id_


def parsed_record(line: str) -> dict[str, Any]:
    """Return the JSON object of a line. A whole number is an integer where one belongs: `max_tokens` of 4.0 is 4.

    Raises InvalidRequestError if the line is no JSON object, or if the object or one inside it has a key twice. Keys
    and values are not checked further.
    """
    record = json_object(line, f"an object with one of {', '.join(PROMPT_KEYS)}")
    for name in (*INTEGER_FIELDS, "num_samples", "priority"):
        if name in record:
            record[name] = json_integer(record[name])
    return record


def read_id(record: dict[str, Any], number: int) -> str | int:
    """Return the line's `id`, or its number if it has none; InvalidRequestError unless a string or an integer."""
    id_ = record.get("id", number)
    if not isinstance(id_, str | int) or isinstance(id_, bool):
        raise refusal("id", told(id_), "a string or an integer")
    return id_


def _check_keys(record: dict[str, Any]) -> None:
    """Raise InvalidRequestError if a line has an unknown key, or a beam search parameter that only a flag can give."""
    for key in record:
        if key in BEAM_FLAGS:
            way_out = f"give --{key.replace('_', '-')} instead"
            raise InvalidRequestError(f"{key}: is the same for all lines of a run; {way_out}", param=key)
        known = (*FIELDS, *LINE_KEYS, "num_samples", *STRUCTURE_FLAGS)
        check_name(key, known, "parameter", not_available=not_available.LINE_KEYS)
