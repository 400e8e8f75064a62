"""What `generate` is asked to do: prompts from the command line or from a file, each with its parameters.

A bad prompt on the command line ends the start; a bad line of a file becomes that line's error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, InvalidRequestError
from .flags import UNBUILT_FLAGS
from .prompts import NOT_BUILT, PROMPT_EXTRAS, PROMPT_KEYS, EncodedPrompt, PromptEncoder, check_priority
from .sampling_params import FIELDS, BeamSearchParams, SamplingParams, check_name, shown

LINE_KEYS = (*PROMPT_KEYS, *PROMPT_EXTRAS, "id")
BEAM_LINE_FIELDS = ("max_tokens", "ignore_eos")
"""Parameters of a line that a beam search has too."""
BEAM_FLAGS = ("beam_width", "length_penalty")
"""Parameters of beam search that only flags give."""
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
    """A line that can be no request, and why."""

    id: str | int
    number: int
    error: InvalidRequestError


@dataclass(frozen=True)
class JobReader:
    """Turns prompts into jobs: chat template, defaults, checks."""

    encoder: PromptEncoder
    defaults: Mapping[str, Any]
    """Sampling parameters from the flags and from the model."""
    max_logprobs: int
    max_num_seqs: int | None
    """Samples of one prompt at most; None while the engine can still be made for as many as are asked for."""
    scheduling_policy: object
    use_chat: bool
    beams: Mapping[str, Any] | None = None
    """Parameters of beam search from the flags: it takes the place of sampling."""
    system: str | None = None
    """System message put before text prompts."""

    def job(self, id_: str | int, number: int, prompt: Any, own_params: Mapping[str, Any]) -> Job:
        """A checked job; InvalidRequestError names what is wrong."""
        if "output_kind" in own_params:
            raise InvalidRequestError(
                "output_kind: is for streams, a line's output is written when it ends; leave it out",
                param="output_kind",
            )
        params = self._params(own_params)
        self.encoder.check_params(params, max_logprobs=self.max_logprobs, max_num_seqs=self.max_num_seqs)
        encoded = self.encoder.encode(self._written_out(prompt))
        check_priority(encoded.priority, self.scheduling_policy)
        return Job(id_, number, encoded, params)

    def _params(self, own_params: Mapping[str, Any]) -> SamplingParams | BeamSearchParams:
        if self.beams is None:
            return SamplingParams(**{"max_tokens": None, **self.defaults, **own_params})
        for name in own_params:
            if name not in BEAM_LINE_FIELDS:
                check_name(name)
                raise InvalidRequestError(
                    f"{name}: has no effect in a beam search, allowed: {', '.join(BEAM_LINE_FIELDS)}; leave it out, or "
                    "leave --beam-width out",
                    param=name,
                )
        return BeamSearchParams(**{"max_tokens": None, **self.beams, **own_params})

    def file_jobs(self, path: Path) -> list[Job | BadLine]:
        """Jobs of a .txt or .jsonl file, in its order. Blank lines are none; a line's number counts from 1."""
        is_json = path.suffix == ".jsonl"
        if path.suffix not in (".txt", ".jsonl"):
            raise ConfigError(f"--prompt-file: got {path.name!r}, allowed: a name ending in .txt or .jsonl")
        jobs: list[Job | BadLine] = []
        line_of_id: dict[str, int] = {}
        for number, line in _lines(path):
            id_: str | int = number
            try:
                own_params: dict[str, Any] = {}
                prompt: Any = _text(line)
                if is_json:
                    record = _record(prompt)
                    id_ = _id(record, number)
                    _check_keys(record)
                    prompt = {key: record[key] for key in (*PROMPT_KEYS, *PROMPT_EXTRAS) if key in record}
                    own_params = {key: value for key, value in record.items() if key not in LINE_KEYS}
                if (first := line_of_id.setdefault(repr(id_), number)) != number:
                    raise InvalidRequestError(
                        f"id: {shown(id_)} is used by line {first} already; give each its own", param="id"
                    )
                jobs.append(self.job(id_, number, prompt, own_params))
            except InvalidRequestError as error:
                jobs.append(BadLine(id_, number, error))
        if not jobs:
            raise ConfigError(f"--prompt-file: {path} holds no prompt; give at least one line")
        return jobs

    def _written_out(self, prompt: Any) -> Any:
        """A text prompt as a chat, if that is wanted; anything else as it is."""
        extras = {key: prompt[key] for key in PROMPT_EXTRAS if key in prompt} if isinstance(prompt, Mapping) else {}
        text = prompt.get("prompt") if isinstance(prompt, Mapping) and {*prompt} - {*extras} == {"prompt"} else prompt
        if not self.use_chat or not isinstance(text, str):
            if self.system is not None:
                raise InvalidRequestError(
                    "prompt: is written out already, --system has no place in it; leave --system out", param="prompt"
                )
            return prompt
        if not text:
            raise InvalidRequestError("prompt: got '', the prompt cannot be empty; give some text", param="prompt")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {"messages": [*system, {"role": "user", "content": text}], **extras}


def error_record(id_: str | int, kind: str, message: str, param: str | None) -> dict[str, Any]:
    """The output line of a request that failed."""
    return {"id": id_, "error": {"type": kind, "message": message[:MAX_ERROR_CHARS], "param": param}}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
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
        raise InvalidRequestError(f"line: is not UTF-8 ({error}); save the file as UTF-8", param=None) from error


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line, object_pairs_hook=_once)
    except InvalidRequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"line: is no JSON ({error}); allowed: one JSON object per line", param=None
        ) from error
    if not isinstance(record, dict):
        raise InvalidRequestError(
            f"line: got a JSON {type(record).__name__}, allowed: an object with one of {', '.join(PROMPT_KEYS)}",
            param=None,
        )
    if "num_samples" in record:
        if "n" in record:
            raise InvalidRequestError("num_samples: is another name of n, got both; leave one out", param="num_samples")
        record["n"] = record.pop("num_samples")
    return record


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which each name stands once."""
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidRequestError(f"{shown(twice)}: is in one object twice; leave one of them out", param=twice[:100])
    return record


def _id(record: dict[str, Any], number: int) -> str | int:
    id_ = record.get("id", number)
    if not isinstance(id_, str | int) or isinstance(id_, bool):
        raise InvalidRequestError(f"id: got {shown(id_)}, allowed: a string or an integer", param="id")
    return id_


def _check_keys(record: dict[str, Any]) -> None:
    for key in record:
        if key in NOT_BUILT or key in UNBUILT_FLAGS:
            raise InvalidRequestError(f"{key}: not available in this version; leave it out", param=key)
        if key in BEAM_FLAGS:
            raise InvalidRequestError(
                f"{key}: is the same for all lines of a run; give --{key.replace('_', '-')} in its place", param=key
            )
        if key not in LINE_KEYS:
            check_name(key, LINE_KEYS)


assert not set(LINE_KEYS) & set(FIELDS), "a field of a line would be both"
