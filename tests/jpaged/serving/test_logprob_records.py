"""Logprobs in the words of OpenAI's protocols, where JSON has no word for them."""

import math

from jpaged.outputs import Logprob
from jpaged.serving.protocols.logprob_records import ChatLogprobs, CompletionLogprobs, prompt_records


def test_a_logprob_of_minus_infinity_is_the_number_that_vllm_writes():
    token = {
        5: Logprob(logprob=-0.5, rank=1, decoded_token="a"),
        7: Logprob(logprob=-math.inf, rank=2, decoded_token="b"),
    }
    excluded = {7: token[7]}
    completion = CompletionLogprobs(shows_ids=False)
    completion.add([5, 7], [token, excluded])
    lists = completion.take()
    assert lists["token_logprobs"] == [-0.5, -9999.0]
    assert lists["top_logprobs"] == [{"a": -0.5, "b": -9999.0}, {"b": -9999.0}]
    (record,) = ChatLogprobs(None, 2, shows_ids=False).records([5], [token])
    assert [one["logprob"] for one in record["top_logprobs"]] == [-0.5, -9999.0]
    assert prompt_records([None, token])[1]["7"]["logprob"] == -9999.0
