"""OpenAI's own client against the server: every answer, and that a stream's pieces make the whole one."""

import json
from typing import Any

import openai
import pydantic
import pytest

from jpaged import Engine, SamplingParams

from .served import Served

CHAT: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "Héllo"}], "max_tokens": 24, "temperature": 0
}  # fmt: skip
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "Once upon", "max_tokens": 24, "temperature": 0}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "three samples": {"temperature": 1.0, "seed": 7, "n": 3},
    "a stop string": {"temperature": 1.0, "seed": 3, "stop": ["a", "e"]},
    "penalties": {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.5, "presence_penalty": -1.0},
    "extra fields": {"temperature": 1.0, "seed": 5, "extra_body": {"top_k": 5, "min_p": 0.01, "ignore_eos": True}},
    "a bias": {"temperature": 1.0, "seed": 5, "logit_bias": {"70": 100}},
}


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


def joined_chat(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Return text, finish reason and logprobs of each choice of a streamed chat."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = found.setdefault(choice.index, {"text": "", "finish": None, "logprobs": []})
            one["text"] += choice.delta.content or ""
            one["finish"] = choice.finish_reason or one["finish"]
            one["logprobs"] += (choice.logprobs.content if choice.logprobs else None) or []
    return found


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 3}], ids=["", "logprobs"])
def test_a_streamed_chat_is_the_whole_one(client, way, logprobs):
    asked = CHAT | way | logprobs
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    streamed = joined_chat(chunks)
    assert [choice.index for choice in whole.choices] == list(range(way.get("n", 1)))
    for choice in whole.choices:
        one = streamed[choice.index]
        assert one["text"] == choice.message.content
        assert one["finish"] == choice.finish_reason
        assert one["logprobs"] == ((choice.logprobs.content if choice.logprobs else None) or [])
    # The second request finds the pages of the first.
    without_cache = lambda usage: usage.model_dump(exclude={"prompt_tokens_details"})  # noqa: E731
    assert without_cache(chunks[-1].usage) == without_cache(whole.usage)
    assert not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 2}, {"logprobs": 2, "echo": True}, {"prompt": ["One", "Two"]}], ids=str
)
def test_a_streamed_completion_is_the_whole_one(client, way, more):
    asked = PROMPT | way | more
    whole = client.completions.create(**asked)
    streamed: dict[int, dict[str, Any]] = {}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            one = streamed.setdefault(choice.index, {"text": "", "finish": None, "logprobs": {}})
            one["text"] += choice.text
            one["finish"] = choice.finish_reason or one["finish"]
            for name, values in choice.logprobs.model_dump().items() if choice.logprobs else ():
                one["logprobs"].setdefault(name, []).extend(values)
    assert len(whole.choices) == len(streamed) == way.get("n", 1) * (len(asked["prompt"]) if "prompt" in more else 1)
    for choice in whole.choices:
        one = streamed[choice.index]
        assert (one["text"], one["finish"]) == (choice.text, choice.finish_reason)
        assert one["logprobs"] == (choice.logprobs.model_dump() if choice.logprobs else {})


def test_an_answer_is_what_the_engine_gives(client, engine: Engine):
    """Tokens, text, logprobs and usage, by the same seed."""
    params = SamplingParams(temperature=0.9, top_p=0.8, seed=11, max_tokens=20, logprobs=2)
    (output,) = engine.generate([PROMPT["prompt"]], params, use_tqdm=False)
    sample = output.outputs[0]
    whole = client.completions.create(
        **PROMPT | {"temperature": 0.9, "top_p": 0.8, "seed": 11, "max_tokens": 20, "logprobs": 2},
        extra_body={"return_token_ids": True},
    )
    choice = whole.choices[0]
    assert choice.text == sample.text
    assert choice.token_ids == list(sample.token_ids)
    assert choice.prompt_token_ids == list(output.prompt_token_ids)
    entries = [scores[token_id] for token_id, scores in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert choice.logprobs.token_logprobs == pytest.approx([one.logprob for one in entries], abs=1e-5)
    assert whole.usage.prompt_tokens == len(output.prompt_token_ids)
    assert whole.usage.completion_tokens == len(sample.token_ids)


def test_token_ids_of_a_chat_stand_where_vllm_has_them(client):
    """Those of the prompt beside the choices, in the first chunk of a stream; those of the output in the choice."""
    asked = CHAT | {"extra_body": {"return_token_ids": True}}
    complete = client.chat.completions.create(**asked)
    assert len(complete.prompt_token_ids) == complete.usage.prompt_tokens
    assert len(complete.choices[0].token_ids) == complete.usage.completion_tokens
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].prompt_token_ids == complete.prompt_token_ids
    assert not any("prompt_token_ids" in chunk.model_extra for chunk in chunks[1:])
    ids = [token_id for chunk in chunks[1:] for choice in chunk.choices for token_id in choice.token_ids]
    assert ids == complete.choices[0].token_ids


def test_an_echo_shows_what_the_prompt_has_become(client):
    """Its own logprobs where they are asked for; what was kept of it; and nothing of the token that is not shown."""
    asked = PROMPT | {"echo": True, "max_tokens": 0, "logprobs": 1}
    choice = client.completions.create(**asked, extra_body={"prompt_logprobs": 3, "return_token_ids": True}).choices[0]
    assert choice.text == PROMPT["prompt"]
    assert (choice.token_ids, choice.stop_reason, choice.finish_reason) == ([], None, "length")
    assert len(choice.prompt_logprobs) == len(choice.prompt_token_ids) == len(choice.logprobs.tokens)
    assert [len(one) >= 3 for one in choice.prompt_logprobs[1:]] == [True] * (len(choice.prompt_token_ids) - 1)
    kept = client.completions.create(**asked, extra_body={"truncate_prompt_tokens": 5}).choices[0]
    assert kept.text == "".join(kept.logprobs.tokens) == PROMPT["prompt"][-5:]


def test_a_prompt_is_cut_to_what_fits_beside_the_output(client):
    asked = PROMPT | {"prompt": "x" * 500, "max_tokens": 20}
    usage = client.completions.create(**asked, extra_body={"truncate_prompt_tokens": -1, "ignore_eos": True}).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (108, 20)


def test_cached_tokens_are_in_the_usage(client):
    prompt = "A prefix that fills some pages of eight tokens each, and is sent twice."
    first, second = (client.completions.create(**PROMPT | {"prompt": prompt}) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 8 * 8
    assert first.choices[0].text == second.choices[0].text


def test_usage_in_each_event_counts_up(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**PROMPT, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 24
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {len(PROMPT["prompt"])}


class Answer(pydantic.BaseModel):
    """What the model is made to answer."""

    model_config = pydantic.ConfigDict(extra="forbid")
    city: str = pydantic.Field(max_length=5)
    is_large: bool


def test_parse_gives_an_object_of_the_schema(client):
    asked = CHAT | {"max_tokens": 100, "temperature": 1.0, "seed": 1}
    parsed = client.chat.completions.parse(**asked, response_format=Answer)
    assert parsed.choices[0].finish_reason == "stop"
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(**asked, response_format=Answer) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed


def test_a_structure_holds_in_completions_too(client):
    extra = {"structured_outputs": {"choice": ["left", "right"]}}
    assert client.completions.create(**PROMPT, extra_body=extra).choices[0].text in ("left", "right")
    whole = client.completions.create(
        **PROMPT | {"max_tokens": 60}, extra_body={"response_format": {"type": "json_object"}}
    )
    if whole.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(whole.choices[0].text), dict)


def test_beams_are_those_of_the_engine(client, engine: Engine):
    from jpaged import BeamSearchParams

    (output,) = engine.beam_search(["Once"], BeamSearchParams(beam_width=3, max_tokens=6), use_tqdm=False)
    extra = {"use_beam_search": True}
    whole = client.completions.create(model="tiny", prompt="Once", n=3, max_tokens=6, extra_body=extra)
    assert [choice.text for choice in whole.choices] == [beam.text for beam in output.outputs]


def test_models_can_be_listed_and_looked_up(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 128)
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    with pytest.raises(openai.NotFoundError, match="The model `another` does not exist"):
        client.chat.completions.create(**CHAT | {"model": "another"})


def test_the_ids_of_answers_are_ours_and_a_clients_id_is_echoed(client):
    headers = {"x-request-id": "client-5"}
    replies = [client.completions.with_raw_response.create(**PROMPT, extra_headers=headers) for _ in range(2)]
    assert [reply.headers["x-request-id"] for reply in replies] == ["client-5", "client-5"]
    assert len({reply.parse().id for reply in replies}) == 2


def test_the_developers_message_joins_the_system_message(client):
    """The tiny template writes roles out, and knows no developer."""
    messages = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}]
    messages.append({"role": "user", "content": "C"})
    joined = [{"role": "system", "content": "A\n\nB"}, messages[2]]
    extra = {"return_token_ids": True}
    ids = [
        client.chat.completions.create(**CHAT | {"messages": one}, extra_body=extra).prompt_token_ids
        for one in (messages, joined)
    ]
    assert ids[0] == ids[1]


def test_echo_with_no_new_token_scores_the_prompt(client, engine: Engine):
    """lm_eval reads the logprobs of a prompt this way, and compares floats exactly to see what is greedy."""
    ids = engine.tokenizer.encode("The quick brown fox")
    params = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0)
    (output,) = engine.generate([ids], params, use_tqdm=False)
    for max_tokens in (0, 1):
        whole = client.completions.create(
            **PROMPT | {"prompt": ids, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
        )
        records = whole.choices[0].logprobs
        assert len(records.token_logprobs) == len(ids) + max_tokens
        assert records.token_logprobs[0] is None
        assert records.top_logprobs[0] is None
        for index, token_id in enumerate(ids[1:], 1):
            entries = output.prompt_logprobs[index]
            assert records.token_logprobs[index] == pytest.approx(entries[token_id].logprob, abs=1e-5)
            is_greedy = records.token_logprobs[index] == max(records.top_logprobs[index].values())
            assert is_greedy == (entries[token_id].rank == 1)
        assert whole.usage.completion_tokens == max_tokens


def test_tokenize_and_detokenize_are_inverse(served: Served):
    status, _, found = served.request("/tokenize", {"model": "tiny", "prompt": "Héllo", "return_token_strs": True})
    assert status == 200
    assert found["count"] == len(found["tokens"]) == len("Héllo".encode())
    assert found["max_model_len"] == 128
    assert served.request("/detokenize", {"tokens": found["tokens"]})[2] == {"prompt": "Héllo"}
    _, _, chat = served.request("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})
    _, _, text = served.request("/detokenize", {"tokens": chat["tokens"]})
    assert text["prompt"] == "<|start|>user: Hi\n<|start|>assistant: "
    assert served.request("/tokenize", {"prompt": "x" * 500})[2]["count"] == 500  # More than the context.
    _, _, info = served.request("/tokenizer_info")
    assert (info["eos_token"], info["eos_token_id"], "chat_template" in info) == ("<|end|>", 0, True)
