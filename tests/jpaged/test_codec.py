"""Messages between processes arrive as they were sent."""

from typing import Any

import msgspec
import pytest

from jpaged import BeamSearchParams, SamplingParams
from jpaged.codec import PackedRequests, decode, encode
from jpaged.messages import AnswerSpec, NewRequest, ResultForm, Scoring
from jpaged.outputs import (
    CompletionOutput,
    Logprob,
    Mark,
    RequestMetrics,
    RequestOutput,
    SampleDelta,
    StepOutputs,
    WeightVersion,
)
from jpaged.remote.core_client import CoreSnapshot, CoreStatus
from jpaged.sampling.sampling_params import ScoreKind
from jpaged.structured_outputs import StructuredOutputsParams

EVERY_FIELD = SamplingParams(
    n=3,
    presence_penalty=0.5,
    temperature=0.25,
    top_k=7,
    seed=-5,
    stop=["a", "b"],
    stop_token_ids=(4,),
    logprobs=2,
    output_kind="delta",
    logit_bias={3: -1.5},
    allowed_token_ids=[3, 4],
    bad_words=("no",),
    structured_outputs=StructuredOutputsParams(json={"type": "object", "enum": [{"a": None}]}),
    thinking_token_budget=9,
    extra_args={"x": 0.5},
)


def new_request(**fields: Any) -> NewRequest:
    required = {
        "request_id": "r", "number": 3, "prompt_token_ids": b"\x01\0\0\0", "prompt": "é 日本",
        "params": SamplingParams(), "max_tokens": 4, "stop_ids": frozenset({2, 1}), "arrival_time": 0.125,
    }  # fmt: skip
    return NewRequest(**{**required, **fields})


def output() -> RequestOutput:
    """Return an output in which every field has a value."""
    logprobs = ({5: Logprob(-0.5, 1, "a"), 7: Logprob(float("-inf"), 90, None)},)
    sample = CompletionOutput(
        1, "text", (5,), -0.5, logprobs, (-0.25,), "stop", 7, (WeightVersion(2, 0, 1),), (Mark(3, 9),)
    )
    metrics = RequestMetrics(0.0, 0.5, 1.0, 1.5, None, 0.5, 2, 1, 64)
    return RequestOutput("r", None, (1, 2), (sample,), True, metrics, 64, (None, *logprobs), "a fault")


@pytest.mark.parametrize(
    "message",
    [
        new_request(),
        new_request(params=EVERY_FIELD, bad_words=((1, 2), (3,)), grammar="start: x", priority=-1, cache_salt="s"),
        new_request(params=BeamSearchParams(beam_width=2, max_tokens=None, early_stopping="never")),
        new_request(form=ResultForm.ARRAYS, scoring=Scoring(continuations=(b"1234",), temperatures=(0.5,),
                    kind=ScoreKind(num_asked=2), asked=(b"12345678",))),
        new_request(answer=AnswerSpec({"f": {"x": ("integer", "null")}, "g": {}}, frozenset({"g"}), "<think>"),
                    mark_ids=frozenset({9}), unenforced=("a",), sent_names={"n": "best_of"}, is_streamed=True),
        new_request(answer=AnswerSpec(None)),
        SampleDelta("r", 1, (4, 5), "ab", ({4: Logprob(-1.0, 2, "a")},), "stop", "b", (Mark(0, 4),)),
        output(),
        StepOutputs([SampleDelta("r", 0, (4,), "a")], {"r": (None, {4: Logprob(-1.0, 2, "a")})}, [output()]),
        CoreStatus(is_alive=True, is_sleeping=False, num_programs_done=3, num_programs=9, held_s=0.5,
                   is_compiling=True, num_steps=5, has_work=True),
        CoreSnapshot(stats={"blocks": 63, "compile_seconds": 0.5}, block_size=16, expert_tokens={1: [4, 0]}),
    ],
)  # fmt: skip
def test_a_message_arrives_as_it_was_sent(message: Any):
    found = decode(encode(message), type(message))
    assert found == message
    assert type(found) is type(message)


def test_integers_beyond_64_bits_become_the_nearest():
    message = new_request(params=SamplingParams(top_k=1 << 70, max_tokens=1 << 64))
    found = decode(encode(message), NewRequest)
    assert isinstance(found.params, SamplingParams)
    assert found.params.top_k == found.params.max_tokens == (1 << 63) - 1
    assert msgspec.structs.replace(found, params=message.params) == message


def test_parameters_are_checked_again_where_they_arrive():
    plain = msgspec.to_builtins(new_request(), builtin_types=(bytes,))
    plain["params"]["temperature"] = 9.0
    with pytest.raises(msgspec.ValidationError, match=r"temperature: got 9.0, allowed: a number in \[0, 2\]"):
        decode(msgspec.msgpack.encode(plain), NewRequest)


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_half_a_message_is_refused(cut: int):
    with pytest.raises(msgspec.DecodeError):
        decode(encode(new_request())[:cut], NewRequest)


def test_another_message_is_refused():
    with pytest.raises(msgspec.ValidationError, match="missing required field `request_id`"):
        decode(encode({}), NewRequest)


def test_what_is_not_plain_is_refused_by_its_type():
    with pytest.raises(TypeError, match="function"):
        encode(new_request(policy_key=lambda: None))


def test_requests_of_one_body_share_parameters_and_grammars():
    grammar = "start: " + "x" * 20_000
    requests = tuple(new_request(params=EVERY_FIELD, number=number, grammar=grammar) for number in range(50))
    requests += (new_request(params=BeamSearchParams(beam_width=2, max_tokens=4)),)
    encoded = encode(PackedRequests.of(requests))
    assert len(encoded) < 2 * len(grammar)
    assert decode(encoded, PackedRequests).unpacked() == requests
