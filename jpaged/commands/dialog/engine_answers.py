"""Answers of an engine in this process."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ...checks import one_line
from ...errors import ContextLengthError, JpagedError
from ...outputs import CompletionOutput
from ...sampling.sampling_params import RequestOutputKind, SamplingParams
from ...text.answers.events import Content, Reasoning
from ...text.answers.scanner import AnswerScanner
from .answers import AnswerError, AnswerPart, Message

if TYPE_CHECKING:
    from ...engine import Engine


class EngineAnswers:
    """The model of an engine that no other caller uses."""

    may_be_interrupted = False  # An exception in the midst of a step would cost a step, or be dropped by a library.
    keeps_thoughts = True  # The template decides: most leave out those of earlier turns.

    def __init__(self, engine: Engine, params: SamplingParams):
        self._engine = engine
        self._params = replace(params, output_kind=RequestOutputKind.DELTA)
        self._num_requests = 0

    def parts(self, messages: Sequence[Message]) -> Generator[AnswerPart, None, None]:
        engine, number = self._engine, self._num_requests
        self._num_requests += 1
        request_id = f"turn-{number}"
        try:
            new = engine.builder.build(request_id, {"messages": messages}, self._params, number=number)
            # No step draws several tokens of a request that is streamed.
            request = engine.loop.make(msgspec.structs.replace(new, is_streamed=True))
            engine.loop.call("chat", partial(engine.loop.queue, request))
        except JpagedError as error:
            raise AnswerError(one_line(error, 1000), is_full=isinstance(error, ContextLengthError)) from error
        format = engine.builder.encoder.answer_format
        scanner = None if new.answer is None or format is None else AnswerScanner(format, new.answer)
        try:
            is_finished = False
            while not is_finished:
                yield AnswerPart()  # Between two steps, where the reader may stop.
                for output in engine.step():
                    if output.error is not None:
                        raise AnswerError(output.error)
                    is_finished = output.finished
                    for sample in output.outputs:
                        yield from _parts(scanner, sample)
        finally:
            engine.abort_request(request_id)


def _parts(scanner: AnswerScanner | None, sample: CompletionOutput) -> Iterator[AnswerPart]:
    """Yield the parts of what is new of a sample; without a scanner all of it is the answer's text."""
    if scanner is None:
        yield AnswerPart(sample.text)
    else:
        events = scanner.feed(sample.text, sample.marks)
        events += scanner.finish() if sample.finish_reason is not None else []
        for event in events:
            if isinstance(event, Reasoning | Content):  # Without tools there are no calls.
                yield AnswerPart(event.text, is_thought=isinstance(event, Reasoning))
    if sample.finish_reason is not None:
        yield AnswerPart(finish_reason=sample.finish_reason)
