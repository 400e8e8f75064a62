"""The encoder of chats, given outputs cut in any way: samples, tokens of thoughts, logprobs and ids."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jpaged.messages import AnswerSpec, NewRequest
from jpaged.outputs import CompletionOutput, Logprob, Mark, SampleDelta, error_output
from jpaged.sampling.sampling_params import SamplingParams
from jpaged.serving.protocols.chat.encoder import ChatEncoder
from jpaged.serving.protocols.generation_request import GenerationRequest
from jpaged.text.answers.bound_format import bind_marks
from jpaged.text.answers.format_names import answer_format

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
FORMATS: dict[str, tuple[str, str, list[str], list[int]]] = {
    "marks of one token": ("hermes", "qwen3", ["<think>", "</think>", "<tool_call>", "</tool_call>"], [0, 0, 5, 7]),
    "several marks": ("openai", "openai_gptoss", ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"], [0, 0, 0, 14]),
    "text alone": ("hermes", "qwen3", [], [0, 0, 18, 27]),  # A line's end joins two thoughts.
}
"""Names of formats, their marks that are tokens, and the tokens of thoughts in each of ANSWERS."""
ANSWERS = [CALL, "No.", "<think>Hm.</think>Yes.", "<think>Hm.</think>Yes.<think>M"]
"""What each sample writes: a character a token, and each mark one."""


def tokens_of(text: str, ids: dict[str, int]) -> list[tuple[int, str]]:
    """Return the tokens of a text, each with its characters."""
    pattern = "|".join([*map(re.escape, sorted(ids, key=len, reverse=True)), "."])
    return [(ids.get(piece, 100 + ord(piece[0])), piece) for piece in re.findall(pattern, text, re.DOTALL)]


def delta_of(tokens: Sequence[tuple[int, str]], index: int, mark_ids: Sequence[int], reason: str | None) -> SampleDelta:
    places, marks = 0, []
    for token_id, piece in tokens:
        marks += [Mark(places, token_id)] if token_id in mark_ids else []
        places += len(piece)
    return SampleDelta(
        request_id="r",
        index=index,
        token_ids=tuple(token_id for token_id, _ in tokens),
        text="".join(piece for _, piece in tokens),
        logprobs=tuple({token_id: Logprob(-1.0, 1, piece)} for token_id, piece in tokens),
        finish_reason=reason,
        marks=tuple(marks),
    )


def encoder_of(format: Any, **fields: Any) -> ChatEncoder:
    new = NewRequest(
        request_id="r", number=0, prompt_token_ids=b"\0" * 8, prompt=None, params=SamplingParams(), max_tokens=9,
        stop_ids=frozenset(), answer=AnswerSpec(tools={"f": {}}), arrival_time=0.0,
    )  # fmt: skip
    request = GenerationRequest(
        model="m", new_requests=(new,), num_samples=len(ANSWERS), num_logprobs=0, has_token_ids=True, **fields
    )
    return ChatEncoder(request, ["r"], None, created=0, fingerprint="f", answer_format=format)


@pytest.mark.parametrize("case", FORMATS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_samples_cut_in_any_way_are_the_complete_response(case: str, size: int):
    calls, thought, marks, num_thought_tokens = FORMATS[case]
    ids = {mark: number for number, mark in enumerate(marks, 1)}
    format = bind_marks(answer_format(calls, thought), ids)
    answers = ANSWERS
    if calls == "openai":
        answers = ["<|channel|>commentary to=functions.f<|message|>{}<|end|>", "<|channel|>final<|message|>No.<|end|>"]
        answers += [f"{HARMONY_THOUGHT}<|start|>assistant<|channel|>final<|message|>Yes.<|end|>", HARMONY_THOUGHT[:-7]]
        num_thought_tokens = [0, 0, 14, 13]
    tokens = [tokens_of(text, ids) for text in answers]
    samples = []
    for index, one in enumerate(tokens):
        delta = delta_of(one, index, ids.values(), "length" if index == 3 else "stop")
        fields = {name: getattr(delta, name) for name in delta.__struct_fields__ if name not in ("request_id", "start")}
        samples.append(CompletionOutput(**fields))
    output = replace(error_output("r", "", ""), outputs=tuple(samples), error=None)
    encoder = encoder_of(format)
    whole = json.loads(encoder.body({"r": output}))
    streaming = encoder_of(format, is_stream=True, has_usage=True)
    chunks = streaming.opening()
    for start in range(0, max(map(len, tokens)), size):
        deltas = []
        for index, one in enumerate(tokens):
            if start < len(one):
                reason = samples[index].finish_reason if start + size >= len(one) else None
                deltas.append(delta_of(one[start : start + size], index, ids.values(), reason))
        chunks += streaming.chunks(deltas)
    chunks += streaming.closing([output])
    events = [json.loads(event.removeprefix("data: ")) for event in chunks.decode().split("\n\n")[:-2]]
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == sum(num_thought_tokens)
    for choice in whole["choices"]:
        own = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert [one for each in own for one in each.get("token_ids", ())] == choice["token_ids"]
        records = [one for each in own if each["logprobs"] for one in each["logprobs"]["content"]]
        assert records == choice["logprobs"]["content"]
        assert len(records) == len(tokens[choice["index"]])
        message = choice["message"]
        for name in ("content", "reasoning", "reasoning_content"):
            joined = "".join(each["delta"].get(name) or "" for each in own)
            assert joined == (message.get(name) or "")
        assert own[-1]["finish_reason"] == choice["finish_reason"]
    first, second, third, fourth = whole["choices"]
    assert (first["finish_reason"], first["message"]["tool_calls"][0]["function"]["name"]) == ("tool_calls", "f")
    assert (second["finish_reason"], second["message"]["content"]) == ("stop", "No.")
    assert (third["message"]["reasoning"], third["message"]["content"]) == ("Hm.", "Yes.")
    assert fourth["finish_reason"] == "length"


def test_ids_of_calls_have_the_length_that_the_template_takes():
    format = bind_marks(answer_format("hermes", None), {})
    for is_short, pattern in ((False, "call_[0-9a-f]{24}"), (True, "[0-9a-f]{9}")):
        encoder = encoder_of(format, is_stream=True, has_short_call_ids=is_short)
        chunk = json.loads(encoder.chunks([delta_of(tokens_of(CALL, {}), 0, (), None)]).decode().split("\n\n")[0][6:])
        assert re.fullmatch(pattern, chunk["choices"][0]["delta"]["tool_calls"][0]["id"])
