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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from .. import not_available
from ..checks import check_name, refusal, shown
from ..errors import ConfigError, InvalidRequestError
from ..messages import Params
from ..sampling.sampling_params import FIELDS, BeamSearchParams, SamplingParams
from ..text.prompts import PROMPT_EXTRAS, PROMPT_KEYS, CheckedParams, EncodedPrompt, PromptEncoder, check_priority
from .flags import BEAM_FLAGS
from .lines import IdTable, LineSource, line_digest
from .resume import FinishedRecords

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
    checked: CheckedParams
    digest: int = 0
    """That of its line, by which a resumed run knows that it has not changed."""

    @property
    def params(self) -> Params:
        """Return its parameters."""
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
    """A line whose result the output file has from an earlier run."""

    number: int
    entry: int
    """The result, as `resume.FinishedRecords` counts them."""


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
        return sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")  # As at the head of a prompt file.
    except UnicodeError as error:  # That of UTF-16 without a byte-order mark has no reason of its own.
        reason = getattr(error, "reason", error)
        raise ConfigError(f"prompt: stdin is not {sys.stdin.encoding} ({reason}); give text") from error


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
    finished: FinishedRecords | None = None
    """The results of an earlier run that is gone on with."""

    @cached_property
    def default_params(self) -> CheckedParams:
        """Return the parameters of a prompt without its own, one object for all of them."""
        return self._checked(self._params({}))

    def job(self, id_: str | int, number: int, prompt: Any, own_params: Mapping[str, Any], digest: int = 0) -> Job:
        """Return a checked job; InvalidRequestError names what is wrong."""
        if "output_kind" in own_params:
            reason = "has no effect on a line, whose output is written when it ends"
            raise InvalidRequestError(f"output_kind: {reason}; leave it out", param="output_kind")
        checked = self._checked(self._params(own_params)) if own_params else self.default_params
        encoded = self.encoder.encode(self._as_chat(prompt))
        check_priority(encoded.priority, self.scheduling_policy)
        return Job(id_, number, encoded, checked, digest)

    def argument_jobs(self, prompts: Sequence[str]) -> Iterator[Job | DoneLine]:
        """Yield a job for each prompt of the command line; InvalidRequestError for the first that is wrong."""
        for number, prompt in enumerate(prompts):
            digest = line_digest(prompt.encode(errors="surrogatepass"))
            entry = None if self.finished is None else self.finished.take(number, digest, number + 1)
            yield self.job(number, number, prompt, {}, digest) if entry is None else DoneLine(number, entry)

    def _checked(self, params: Params) -> CheckedParams:
        return self.encoder.check_params(params, max_logprobs=self.max_logprobs, max_num_seqs=self.max_num_seqs)

    def _params(self, own_params: Mapping[str, Any]) -> Params:
        if self.beams is None:
            return SamplingParams(**{"max_tokens": None, **self.defaults, **own_params})
        for name in own_params:
            if name not in BEAM_LINE_FIELDS:
                check_name(name, FIELDS, "parameter", not_available=not_available.SAMPLING_PARAMETERS)
                allowed = f"allowed: {', '.join(BEAM_LINE_FIELDS)}; leave it out, or leave --beam-width out"
                raise InvalidRequestError(f"{name}: has no effect in a beam search, {allowed}", param=name)
        return BeamSearchParams(**{"max_tokens": None, **self.beams, **own_params})

    def file_jobs(self, lines: LineSource) -> Iterator[Job | BadLine | DoneLine | None]:
        """Yield what each line of a .txt or .jsonl file becomes, in order; None where a pipe has no line yet.

        A line that has not changed since its result was written is not read any further.
        """
        ids, is_json = IdTable(), lines.format == "jsonl"
        for numbered in lines:
            if numbered is None:
                yield None
                continue
            number, line = numbered
            digest = line_digest(line)
            if (entry := self._finished_entry(line, number, digest, ids, is_json)) is not None:
                yield DoneLine(number, entry)
                continue
            id_: str | int | None = None if is_json else number
            try:
                prompt: Any = _decoded(line)
                record = _parsed_record(prompt) if is_json else {}
                id_ = _read_id(record, number)
                if is_json:  # The ids of other lines are their numbers.
                    self._refuse_taken_id(id_, number, ids)
                    _check_keys(record)
                    prompt = {key: record[key] for key in (*PROMPT_KEYS, *PROMPT_EXTRAS) if key in record}
                own_params = {key: value for key, value in record.items() if key not in LINE_KEYS}
                yield self.job(id_, number, prompt, own_params, digest)
            except InvalidRequestError as error:
                if id_ is None:
                    text = str(error).removeprefix("line: ")
                    error = InvalidRequestError(f"line {number}: {text}", param=error.param)
                yield BadLine(id_, number, error)

    def _finished_entry(self, line: bytes, number: int, digest: int, ids: IdTable, is_json: bool) -> int | None:
        """Return the entry of an earlier run's result of this line, if the line has not changed; None otherwise.

        Of two lines with one id only the first has a result.
        """
        if self.finished is None:
            return None
        id_ = _id_of_known_line(line, number) if is_json else number
        if id_ is None or ids.get(id_) is not None:
            return None
        return self.finished.take(id_, digest, number)

    def _refuse_taken_id(self, id_: str | int, number: int, ids: IdTable) -> None:
        """Note that a line has this id; InvalidRequestError if an earlier line has it."""
        first = None if self.finished is None else self.finished.taker_of(id_)
        if first is None:
            first = ids.set_default(id_, number)
        if first != number:
            raise refusal("id", f"{shown(id_)}, which line {first} has too", "an id of its own for each line")

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


def error_record(id_: str | int | None, error: InvalidRequestError | str) -> dict[str, Any]:
    """Return the output line of a request that was refused, or that the engine failed with the message `error`."""
    kind, param = ("EngineError", None) if isinstance(error, str) else (type(error).__name__, error.param)
    return {"id": id_, "error": {"type": kind, "message": str(error)[:MAX_ERROR_CHARS], "param": param}}


class _LineId(msgspec.Struct, gc=False):
    """The only field of a line that is read where all of it was checked by an earlier run."""

    id: str | int | None = None


_LINE_ID_DECODER = msgspec.json.Decoder(_LineId)


def _id_of_known_line(line: bytes, number: int) -> str | int | None:
    """Return the id of a line of JSON, its number where it has none; None if a closer look is needed."""
    try:
        id_ = _LINE_ID_DECODER.decode(line).id
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:  # Python takes what msgspec refuses, such as a byte-order mark and lone surrogates.
            return _read_id(_parsed_record(_decoded(line)), number)
        except InvalidRequestError:
            return None
    return number if id_ is None else id_


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")  # Some editors begin a file with a byte-order mark.
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"line: is not UTF-8 ({error}); save the file as UTF-8") from error


def _parsed_record(line: str) -> dict[str, Any]:
    """Return the JSON object of a line."""
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


def _read_id(record: dict[str, Any], number: int) -> str | int:
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
