"""Outputs arrive whole and once, whatever becomes of the messages that they are sent in."""

from array import array
from typing import Any

import msgspec
import pytest

from jpaged import SamplingParams
from jpaged.codec import decode, encode
from jpaged.errors import (
    ConfigError,
    ContextLengthError,
    EngineStoppedError,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
)
from jpaged.messages import NewRequest
from jpaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SampleDelta, StepOutputs
from jpaged.remote import sent_outputs
from jpaged.remote.failures import Failure, error_of, failure_of
from jpaged.remote.message_socket import MAX_MESSAGE_BYTES
from jpaged.remote.sent_outputs import LOST, ArrivingOutputs, DepartingOutputs
from jpaged.remote.wire import SENT_BEFORE

PROMPT = (5, 6, 7, 8, 9)
METRICS = RequestMetrics(0.0, None, None, None, None, None, 0, 0, 0)


def message(request_id: str) -> NewRequest:
    tokens = array("i", PROMPT).tobytes()
    return NewRequest(
        request_id=request_id, number=0, prompt_token_ids=tokens, prompt="a prompt", params=SamplingParams(),
        max_tokens=9, stop_ids=frozenset(), arrival_time=0.0,
    )  # fmt: skip


def delta(request_id: str, start: int, *token_ids: int, end: str | None = None, index: int = 0) -> SampleDelta:
    return SampleDelta(request_id, index, token_ids, "x" * len(token_ids), finish_reason=end, start=start)


def output(request_id: str, *, is_last: bool = True, prompt_logprobs: Any = None) -> RequestOutput:
    sample = CompletionOutput(index=0, text="abc", token_ids=(1, 2, 3))
    return RequestOutput(request_id, "a prompt", PROMPT, (sample,), is_last, METRICS, 0, prompt_logprobs)


def outputs(*deltas: SampleDelta, ends: tuple[RequestOutput, ...] = (), prompt_logprobs: Any = None) -> StepOutputs:
    return StepOutputs(list(deltas), prompt_logprobs or {}, list(ends))


def over_the_wire(departing: DepartingOutputs, arriving: ArrivingOutputs, step: StepOutputs) -> Any:
    """Return what a reader gets of the outputs of a step, and the number of pieces that they came in, each twice."""
    pieces, sent = departing.sent(step)
    for piece in pieces:
        for _ in range(2):
            arriving.take_piece(decode(encode(piece), type(piece)))
    taken, lost = arriving.taken(decode(encode(sent), StepOutputs))
    assert lost == []
    return taken, len(pieces)


def test_prompts_are_not_sent_and_come_back():
    departing, arriving = DepartingOutputs(1, 2), ArrivingOutputs([message("a"), message("b")])
    _, sent = departing.sent(outputs(ends=(output("a"),)))
    assert (sent.outputs[0].prompt, sent.outputs[0].prompt_token_ids) == (None, ())
    assert not departing.are_over
    assert arriving.taken(sent)[0].outputs == [output("a")]
    assert not arriving.are_over
    over_the_wire(departing, arriving, outputs(ends=(output("b"),)))
    assert departing.are_over
    assert arriving.are_over


def test_logprobs_of_prompts_come_in_pieces_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sent_outputs, "PIECE_LOGPROBS", 4)
    entries = (None, *({token: Logprob(-1.0, 1, "a"), 99: Logprob(-2.0, 2, "b")} for token in PROMPT[1:]))
    departing, arriving = DepartingOutputs(1, 1), ArrivingOutputs([message("a")])
    first = outputs(delta("a", 0, 1), prompt_logprobs={"a": entries})
    assert over_the_wire(departing, arriving, first) == (first, 2)
    last = outputs(ends=(output("a", prompt_logprobs=entries),))
    assert over_the_wire(departing, arriving, last) == (last, 0)


@pytest.mark.parametrize(("num_tokens", "num_logprobs"), [(4, 1 << 18), (50_000, 20)], ids=["all tokens", "a book"])
def test_no_piece_comes_near_the_length_of_the_longest_message(num_tokens: int, num_logprobs: int):
    """One of 262,144 tokens with long texts for each place, and 20 for each of many."""
    entry = {token: Logprob(-1.5, token + 1, "x" * 32) for token in range(num_logprobs)}
    step = outputs(prompt_logprobs={"a": (None, *[entry] * num_tokens)})
    pieces, _ = DepartingOutputs(1, 1).sent(step)
    assert sum(len(piece.entries) for piece in pieces) == num_tokens + 1
    assert max(len(encode(piece)) for piece in pieces) < MAX_MESSAGE_BYTES / 4


def test_cumulative_outputs_have_their_prompts_logprobs_each_time():
    entries = (None, *({token: Logprob(-1.0, 1, "a")} for token in PROMPT[1:]))
    departing, arriving = DepartingOutputs(1, 1), ArrivingOutputs([message("a")])
    for is_last, num_pieces in ((False, 1), (True, 0)):
        step = outputs(ends=(output("a", is_last=is_last, prompt_logprobs=entries),))
        assert over_the_wire(departing, arriving, step) == (step, num_pieces)


def test_what_comes_twice_is_left_out():
    arriving = ArrivingOutputs([message("a"), message("b")])
    steps = [
        outputs(delta("a", 0, 1, 2), delta("a", 0, 1, index=1)),
        outputs(delta("a", 2, 3), delta("b", 0, 4)),
        outputs(delta("a", 3, end="stop"), delta("a", 1, 5, end="stop", index=1), ends=(output("a"),)),
        outputs(delta("b", 1, 6, end="stop"), ends=(output("b"),)),
    ]
    for step in steps:
        assert arriving.taken(step) == (step, [])
        assert arriving.taken(step) == (outputs(), [])
    assert arriving.are_over


LOSSES = {
    "a delta": outputs(delta("a", 3, 4), delta("b", 0, 4)),
    "a delta of which a part has come": outputs(delta("a", 1, 2, 3), delta("b", 0, 4)),
    "the end of a sample": outputs(delta("a", 4, end="stop"), delta("b", 0, 4), ends=(output("a"),)),
    "logprobs of the prompt": outputs(delta("b", 0, 4), ends=(output("a", prompt_logprobs=SENT_BEFORE),)),
}


@pytest.mark.parametrize("step", LOSSES.values(), ids=LOSSES.keys())
def test_a_lost_part_ends_its_request_alone_by_an_error(step: StepOutputs):
    arriving = ArrivingOutputs([message("a"), message("b")])
    arriving.taken(outputs(delta("a", 0, 1, 2)))
    taken, lost = arriving.taken(step)
    assert lost == ["a"]
    assert taken.deltas == [delta("b", 0, 4)]
    (failed,) = taken.outputs
    assert (failed.request_id, failed.error, failed.outputs[0].finish_reason) == ("a", LOST, "error")
    assert not arriving.are_over
    assert arriving.taken(outputs(delta("a", 2, 3), ends=(output("a"),))) == (outputs(), [])
    end = outputs(delta("b", 1, 5), ends=(output("b"),))
    assert arriving.taken(end) == (end, [])
    assert not arriving.are_over, "the core has to be told to drop it"


def test_requests_of_other_streams_are_left_out():
    arriving = ArrivingOutputs([message("a")])
    strange = outputs(delta("z", 0, 1), ends=(output("z"),), prompt_logprobs={"z": SENT_BEFORE})
    assert arriving.taken(strange) == (outputs(), [])


ERRORS: list[Exception] = [
    InvalidRequestError("prompt: bad", param="prompt"),
    ContextLengthError.of(10, "your prompt has 12 tokens", "shorten it", num_prompt_tokens=12),
    QueueFullError("waiting_tokens", got=9, allowed=8),
    ConfigError("model: none"),
    ModelLoadError("model.safetensors: cut"),
    EngineStoppedError("the engine was shut down"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was_raised(error: Exception):
    found = error_of(decode(encode(failure_of(error)), Failure))
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


def test_an_error_of_no_class_of_ours_arrives_as_the_nearest():
    class SpecialError(InvalidRequestError):
        pass

    assert type(error_of(failure_of(SpecialError("a", param="b")))) is InvalidRequestError
    found = error_of(failure_of(KeyError("x\ny")))
    assert (type(found).__name__, str(found), found.param) == ("JpagedError", "KeyError: 'x\\ny'", None)
    assert type(error_of(Failure("SystemExit", "a", {"param": None}))).__name__ == "JpagedError"


def test_only_plain_attributes_of_an_error_are_sent():
    error = ConfigError("a", param="b")
    error.__dict__["of_python"] = object()
    assert msgspec.to_builtins(failure_of(error)) == ["ConfigError", "a", {"param": "b"}]
